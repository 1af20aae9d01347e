// Package api is what gopy binds: the functions by which Python reaches the engine. The C files of bind/core call
// them; package binding says what they do.
//
// Each takes integers and texts, and returns one integer and an error. A result is a struct in C memory, and its
// address is returned; bind/core makes Python objects of it and frees it.
package api
