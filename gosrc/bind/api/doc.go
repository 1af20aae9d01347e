// Package api has the functions with which Python calls the engine. gopy binds them, and the C files of bind/core call
// them. Package binding implements them.
//
// Each function takes integers and texts, and returns one integer and an error. A result is a struct in C memory, whose
// address is returned. bind/core converts it to Python objects and frees it.
package api
