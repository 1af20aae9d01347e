package bench

// This file prints the results.

import (
	"fmt"
	"io"
)

// WriteHead prints the machine, the GPUs, and the expected duration.
func WriteHead(w io.Writer, rep *Report) {
	m := rep.Machine
	fmt.Fprintf(w, "%s, %d cores, %s/%s, decoder %s\n", m.CPU, m.Cores, m.OS, m.Arch, m.Decoder)
	if rep.Device != nil {
		for _, g := range rep.Device.Info {
			fmt.Fprintf(w, "cuda:%d is %s, PCIe %d x%d\n", g.Index, g.Name, g.LinkGen, g.LinkWidth)
		}
	}
	fmt.Fprintf(w, "this takes about %.0f s\n", max(1, rep.Estimate))
}

// WriteRow prints one row: the operation, the result, and the limit.
func WriteRow(w io.Writer, row Row) {
	value := numberText(row.Value)
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
