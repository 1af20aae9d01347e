package page

// This file makes the page of several charts: the figures of one run, each a bar beside
// its floor and beside the same figure of an earlier run.

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A Chart is a table with a bar for each figure. All of them share one scale.
type Chart struct {
	Title string
	About string // below the title: what was measured, on which machine; may be ""
	Unit  string // of the scale: "GB/s"
	Bars  []Bar
}

// A Bar is one figure. Its texts are shown as they are.
type Bar struct {
	Name  string
	Value float64
	Text  string // the value as it is read: "75.6 GB/s"
	Note  string // behind it, or ""
	// Floor is a mark of this bar's own, 0 for none, and FloorText what it is.
	Floor     float64
	FloorText string
	// Before is the same figure of an earlier run, 0 for none, drawn as a thin bar
	// below it, and BeforeText that figure as it is read.
	Before     float64
	BeforeText string
}

const chartStyle = `<style>
section { margin: 20px 0; max-width: 1000px; } h2 { font-size: 16px; margin: 0; }
.chart td:nth-child(2) { width: 45%; min-width: 12em; }
.track { position: relative; height: 24px; }
.track * { position: absolute; left: 0; }
.own { top: 1px; height: 15px; background: #1f6feb; } .was { top: 18px; height: 5px; background: #8a93a0; }
.floor { height: 22px; border-left: 2px solid #d0453c; }
</style>
`

// Charts returns a page with charts below one another. Lines stand below the title.
func Charts(title string, lines []string, charts []Chart) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "%s<h1>%s</h1>\n", chartStyle, htmlText(title))
	for _, line := range lines {
		fmt.Fprintf(&b, "<p>%s</p>\n", htmlText(line))
	}
	for i := range charts {
		charts[i].writeTo(&b)
	}
	return []byte(strings.Replace(staticPage("@figures@"), "@figures@", b.String(), 1))
}

// writeTo writes a chart as a table with a row for each bar.
func (c *Chart) writeTo(b *strings.Builder) {
	longest := 0.0
	for _, x := range c.Bars {
		longest = max(longest, x.Value, x.Floor, x.Before)
	}
	percent := func(value float64) float64 { return 100 * max(0, value) / max(longest, 1e-300) }
	fmt.Fprintf(b, "<section>\n<h2>%s</h2>\n<p>%s</p>\n<div class=\"wide\"><table class=\"chart\">\n",
		htmlText(c.Title), htmlText(c.About))
	fmt.Fprintf(b, "<tr><th scope=\"col\">figure</th><th></th><th scope=\"col\">%s</th></tr>\n", htmlText(c.Unit))
	for _, x := range c.Bars {
		fmt.Fprintf(b, "<tr><th scope=\"row\">%s</th><td><div class=\"track\">", htmlText(x.Name))
		fmt.Fprintf(b, "<div class=\"own\" style=\"width:%.2f%%\"></div>", percent(x.Value))
		if x.Before > 0 {
			fmt.Fprintf(b, "<div class=\"was\" style=\"width:%.2f%%\"></div>", percent(x.Before))
		}
		if x.Floor > 0 {
			fmt.Fprintf(b, "<div class=\"floor\" style=\"left:%.2f%%\"></div>", percent(x.Floor))
		}
		fmt.Fprintf(b, "</div></td><td>%s", htmlText(x.Text))
		for _, more := range []string{x.Note, x.FloorText, x.BeforeText} {
			if more != "" {
				fmt.Fprintf(b, "; %s", htmlText(more))
			}
		}
		b.WriteString("</td></tr>\n")
	}
	b.WriteString("</table></div>\n</section>\n")
}

// escaped does what package html does, which brings a table of all entities along.
var escaper = strings.NewReplacer("&", "&amp;", "'", "&#39;", "<", "&lt;", ">", "&gt;", `"`, "&#34;")

// htmlText makes any text one of HTML: no mark-up, no character that it forbids.
func htmlText(text string) string {
	return escaper.Replace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == utf8.RuneError || r >= 0xfffe && r <= 0xffff {
			return '�'
		}
		return r
	}, text))
}
