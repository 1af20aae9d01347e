// Package api is what gopy binds: the six functions by which Python reaches the
// engine. The C files of bind/core call them; binding says what they do.
//
// Each takes integers and texts, and returns one integer and an error. What a
// verb gives is a struct of C's memory whose address is returned; take.c makes
// Python objects of it and frees it.
package api
