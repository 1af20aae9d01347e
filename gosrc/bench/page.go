package bench

// This file makes a page of the answers: figures beside their floors, and beside
// those of an earlier run.

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/page"
)

// ReadReport reads what bench --json printed. Anything else is errs.ErrFormat.
func ReadReport(text []byte) (*measure.Report, error) {
	var rep measure.Report
	if err := json.Unmarshal(text, &rep); err != nil {
		return nil, errs.New(errs.ErrFormat, "not a report of overwire bench --json: %v", err)
	}
	if len(rep.Rows) == 0 {
		return nil, errs.New(errs.ErrFormat, "not a report of overwire bench --json: it has no rows")
	}
	return &rep, nil
}

// Page returns a page of a report. If before is not nil, each figure stands beside
// that of the same name there.
func Page(rep, before *measure.Report) []byte {
	lines := []string{machineText(rep)}
	if before != nil {
		lines = append(lines, "Before: "+machineText(before))
	}
	var charts []page.Chart
	missing := 0
	for _, row := range rep.Rows {
		last := len(charts) - 1
		if last < 0 || charts[last].Title != row.Group {
			charts = append(charts, chartOf(row))
			last++
		}
		var was *measure.Row
		if before != nil {
			if i := slices.IndexFunc(before.Rows, func(x measure.Row) bool {
				return x.Group == row.Group && x.Name == row.Name && x.Unit == row.Unit && x.Value > 0
			}); i >= 0 {
				was = &before.Rows[i]
			} else {
				missing++
			}
		}
		charts[last].Bars = append(charts[last].Bars, barOf(row, was))
	}
	if missing > 0 {
		lines = append(lines, fmt.Sprintf(
			"%d figures have none of the same name before: another size or device has other names.", missing))
	}
	return page.Charts("overwire bench", lines, charts)
}

func machineText(rep *measure.Report) string {
	return strings.Join(machineLines(rep), "; ") + fmt.Sprintf("; measured in %.0f s", rep.Seconds)
}

// machineLines are what was measured on: the machine, and each GPU.
func machineLines(rep *measure.Report) []string {
	m := rep.Machine
	lines := []string{fmt.Sprintf("%s, %d cores, %s/%s, decoder %s", m.CPU, m.Cores, m.OS, m.Arch, m.Decoder)}
	if rep.Device == nil {
		return lines
	}
	for _, g := range rep.Device.Info {
		lines = append(lines, fmt.Sprintf("cuda:%d is %s, PCIe %d x%d", g.Index, g.Name, g.LinkGen, g.LinkWidth))
	}
	return lines
}

// chartOf is the chart of a row's group, without bars.
func chartOf(row measure.Row) page.Chart {
	c := page.Chart{Title: row.Group, Unit: row.Unit}
	if row.Unit == "x" {
		c.Unit = "of the original"
		c.About = "Stored bytes as a share of the original: shorter is better. "
	} else {
		c.About = row.Unit + ": longer is better. "
	}
	if row.Floor > 0 {
		c.About += "The mark is " + row.FloorName + ", measured in the same run."
	}
	return c
}

func barOf(row measure.Row, was *measure.Row) page.Bar {
	number := measure.Number
	if row.Unit == "x" {
		number = func(v float64) string { return fmt.Sprintf("%.3f", v) }
	}
	x := page.Bar{Name: row.Name, Value: row.Value, Text: number(row.Value), Note: row.Note, Floor: row.Floor}
	switch {
	case row.Missing != "":
		x.Text = row.Missing
	case row.Floor > 0 && row.Unit == "x":
		x.FloorText = fmt.Sprintf("least %s", number(row.Floor))
	case row.Floor > 0:
		x.FloorText = fmt.Sprintf("%.2f of %s", row.Share, number(row.Floor))
	}
	if was != nil {
		x.Before, x.BeforeText = was.Value, fmt.Sprintf("before %s: %+.1f %%", number(was.Value),
			100*(row.Value/was.Value-1))
	}
	return x
}
