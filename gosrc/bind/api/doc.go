// Package api contains the functions that Python calls in the engine. gopy binds them, and the C files of bind/core
// call them. Package binding implements them.
//
// Each function takes integers and strings, and returns one integer and an error. For functions with a result, the
// integer is the address of a struct in C memory. bind/core converts the struct to Python objects and frees it.
package api
