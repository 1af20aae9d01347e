package spawn

// Out is where panics are printed.
var Out = &out
