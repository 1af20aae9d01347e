package bench

import (
	"fmt"
	"io"
	"strings"
)

// Text writes one row for people.
func (row Row) Text(w io.Writer) {
	if row.Missing != "" {
		fmt.Fprintf(w, "  %-62s not measured: %s\n", row.Name, row.Missing)
		return
	}
	value := fmt.Sprintf("%9s %-4s", number(row.Value), row.Unit)
	beside := ""
	if row.Floor > 0 {
		share := fmt.Sprintf("%.2f", row.Share)
		if row.Share < 0.1 || row.Unit == "x" {
			share = fmt.Sprintf("%.4f", row.Share)
		}
		beside = fmt.Sprintf("%6s x %s (%s)", share, row.FloorName, number(row.Floor))
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
	note := row.Note
	if row.Runs > 0 {
		note = strings.TrimSuffix(fmt.Sprintf("%s to %s in %d; %s", number(row.Low), number(row.High), row.Runs, note), "; ")
	}
	if note != "" {
		line += "  [" + note + "]"
	}
	fmt.Fprintln(w, strings.TrimRight(line, " "))
}

// Text writes the machine, its floors and the device.
func (rep *Report) Text(w io.Writer) {
	rep.Floors.Text(w, rep.Machine)
	d := rep.Device
	if d == nil {
		return
	}
	for _, g := range d.Info {
		fmt.Fprintf(w, "cuda:%d is %s, compute %s, %.0f GB, PCIe %d x%d, driver for CUDA %s\n", g.Index, g.Name, g.Compute, float64(g.Memory)/1e9, g.LinkGen, g.LinkWidth, g.Driver)
	}
	fmt.Fprintf(w, "loads to %s, files on %s\n", d.Name, d.Files)
}

// Text writes the machine and its floors.
func (f Floors) Text(w io.Writer, m Machine) {
	fmt.Fprintf(w, "%s, %d cores, %s/%s, decoder %s, huge pages %s, %s\n", m.CPU, m.Cores, m.OS, m.Arch, m.Decoder, m.THP, m.Go)
	fmt.Fprintf(w, "floors of this run, GB/s, one core / all cores: memcpy %s / %s, pread from page cache %s / %s,\n"+
		"first touch of huge pages %s / %s, pread to fresh memory %s\n",
		number(f.CopyOne), number(f.CopyAll), number(f.ReadOne), number(f.ReadAll),
		number(f.FaultOne), number(f.FaultAll), number(f.RawCopy))
}

// number shows three significant digits, ratios four.
func number(v float64) string {
	switch {
	case v < 0, v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1.01:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.4f", v)
}
