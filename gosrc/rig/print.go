package main

// This file writes the table.

import (
	"fmt"
	"io"
	"strings"

	"github.com/overwire/overwire/gosrc/measure"
)

func writeRow(w io.Writer, row measure.Row) {
	if row.Missing != "" {
		fmt.Fprintf(w, "  %-62s not measured: %s\n", row.Name, row.Missing)
		return
	}
	value := fmt.Sprintf("%9s %-4s", measure.Number(row.Value), row.Unit)
	beside := ""
	if row.Floor > 0 {
		share := fmt.Sprintf("%.2f", row.Share)
		if row.Share < 0.1 || row.Unit == "x" {
			share = fmt.Sprintf("%.4f", row.Share)
		}
		beside = fmt.Sprintf("%6s x %s (%s)", share, row.FloorName, measure.Number(row.Floor))
	}
	verdict := ""
	if row.Reached != nil {
		verdict = "reached"
		if !*row.Reached {
			verdict = "FALLS SHORT"
		}
		verdict += "  goal " + row.Goal
	}
	line := fmt.Sprintf("  %-62s %s  %-42s %s", row.Name, value, beside, verdict)
	if row.Note != "" {
		line += "  [" + row.Note + "]"
	}
	fmt.Fprintln(w, strings.TrimRight(line, " "))
}

// writeHead writes the machine, its floors and the device.
func writeHead(w io.Writer, rep *measure.Report) {
	m, f := rep.Machine, rep.Floors
	fmt.Fprintf(w, "%s, %d cores, %s/%s, decoder %s, huge pages %s, %s\n", m.CPU, m.Cores, m.OS, m.Arch, m.Decoder,
		m.THP, m.Go)
	fmt.Fprintf(w, "floors of this run, GB/s, one core / all cores: memcpy %s / %s, pread from page cache %s / %s,\n"+
		"first touch of huge pages %s / %s, pread to fresh memory %s\n",
		measure.Number(f.CopyOne), measure.Number(f.CopyAll), measure.Number(f.ReadOne), measure.Number(f.ReadAll),
		measure.Number(f.FaultOne), measure.Number(f.FaultAll), measure.Number(f.RawCopy))
	d := rep.Device
	if d == nil {
		return
	}
	for _, g := range d.Info {
		fmt.Fprintf(w, "cuda:%d is %s, compute %s, %.0f GB, PCIe %d x%d, driver for CUDA %s\n", g.Index, g.Name,
			g.Compute, float64(g.Memory)/1e9, g.LinkGen, g.LinkWidth, g.Driver)
	}
	fmt.Fprintf(w, "loads to %s, files on %s\n", d.Name, d.Files)
}
