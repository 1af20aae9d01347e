package bench

// This file prints the answers.

import (
	"fmt"
	"io"

	"github.com/overwire/overwire/gosrc/measure"
)

// WriteHead prints what is measured, on which machine, and about how long that
// takes.
func WriteHead(w io.Writer, rep *measure.Report) {
	for _, line := range machineLines(rep) {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "this takes about %.0f s\n", max(1, rep.Estimate))
}

// WriteRow prints one row: what was done, the answer, and the floor.
func WriteRow(w io.Writer, row measure.Row) {
	value := measure.Number(row.Value)
	switch {
	case row.Unit == "x":
		fmt.Fprintf(w, "  %s: %.3f of their size; %s: %.3f\n", row.Name, row.Value, row.FloorName, row.Floor)
		return
	case row.Floor > 0:
		value = fmt.Sprintf("%s %s, %.2f of %s", value, row.Unit, row.Share, row.FloorName)
	default:
		value += " " + row.Unit
	}
	if row.Note != "" {
		value += " (" + row.Note + ")"
	}
	fmt.Fprintf(w, "  %s: %s\n", row.Name, value)
}
