package page

// This file draws bar charts as SVG: figures beside their floors. The same drawing
// stands in pages and, as a file, in Markdown.

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// A Chart has a horizontal bar for each figure. All of them share one scale.
type Chart struct {
	Title string
	About string // below the title: what was measured, on which machine; may be ""
	Unit  string // of the scale: "GB/s"
	Limit *Limit // one floor of all bars, or nil
	Bars  []Bar
}

// A Limit is a dashed line across the whole chart.
type Limit struct {
	Name  string
	Value float64
}

// A Bar is one figure. Its texts are shown as they are.
type Bar struct {
	Name  string
	Value float64
	Text  string // the value as it is read: "75.6 GB/s"
	Note  string // behind it, or ""
	Other bool   // of another program: drawn in grey
	// Floor is a mark of this bar's own, 0 for none, and FloorText what it is.
	Floor     float64
	FloorText string
	// Before is the same figure of an earlier run, 0 for none, drawn as a thin bar
	// below it, and BeforeText that figure as it is read.
	Before     float64
	BeforeText string
}

// Sizes of a chart, in its own units, which are pixels at full width. Letters are
// taken to be as wide as those of a wide font.
const (
	chartWidth  = 760
	chartMargin = 16
	barHeight   = 18
	thinHeight  = 6
	rowHeight   = 34
	letter      = 7.1
	lineLetters = 102 // of a whole line
	nameLetters = 42
)

const chartStyle = `.ow{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}` +
	`.ow .back{fill:#fff;stroke:#d0d4da}.ow text{fill:#1a1a1a}.ow .dim{fill:#5c5c5c}.ow .head{font-size:15px;font-weight:600}` +
	`.ow .own{fill:#1f6feb}.ow .other{fill:#9aa3ad}.ow .was{fill:#8a93a0}.ow .line{stroke:#c8c8c8}.ow .floor{stroke:#b3261e;stroke-width:2}` +
	`.ow .limit{stroke:#b3261e;stroke-dasharray:5 4;stroke-width:1.5}` +
	`@media(prefers-color-scheme:dark){.ow .back{fill:#16181c;stroke:#3a3d43}.ow text{fill:#ececec}.ow .dim{fill:#a6a6a6}` +
	`.ow .own{fill:#58a6ff}.ow .other{fill:#6b7480}.ow .was{fill:#8a93a0}.ow .line{stroke:#44474d}.ow .floor,.ow .limit{stroke:#ff8a80}}`

// SVG draws the chart. Its description, for screen readers, has every figure; id
// tells the charts of one page apart.
func (c *Chart) SVG(id string) string {
	d := drawing{Chart: c}
	d.measure()
	var b strings.Builder
	id = xmlText(id)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="ow" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="%s-title" aria-describedby="%s-desc">`+"\n",
		chartWidth, d.height, chartWidth, d.height, id, id)
	fmt.Fprintf(&b, "<title id=\"%s-title\">%s</title>\n<desc id=\"%s-desc\">%s</desc>\n<style>%s</style>\n", id, xmlText(c.Title), id, xmlText(c.describe()), chartStyle)
	fmt.Fprintf(&b, "<rect class=\"back\" x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"8\"/>\n", chartWidth-1, d.height-1)
	fmt.Fprintf(&b, "<text class=\"head\" x=\"%d\" y=\"28\">%s</text>\n", chartMargin, xmlText(c.Title))
	for i, line := range d.about {
		fmt.Fprintf(&b, "<text class=\"dim\" x=\"%d\" y=\"%d\">%s</text>\n", chartMargin, 48+17*i, xmlText(line))
	}
	fmt.Fprintf(&b, "<path class=\"line\" d=\"M%.1f %dV%d\"/>\n", d.left, d.top-6, d.bottom)
	for i := range c.Bars {
		d.bar(&b, i)
	}
	if c.Limit != nil {
		d.limit(&b)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// describe says the whole chart in words.
func (c *Chart) describe() string {
	var parts []string
	if c.About != "" {
		parts = append(parts, strings.TrimRight(c.About, ". "))
	}
	if c.Limit != nil {
		parts = append(parts, fmt.Sprintf("Dashed line: %s", c.Limit.Name))
	}
	for i := range c.Bars {
		x := &c.Bars[i]
		parts = append(parts, strings.Join(append([]string{x.Name + ": " + x.Text}, x.more()...), ", "))
	}
	return strings.Join(parts, ". ") + "."
}

// more are the texts behind the value.
func (x *Bar) more() []string {
	return slices.DeleteFunc([]string{x.Note, x.FloorText, x.BeforeText}, func(s string) bool { return s == "" })
}

// drawing is a chart with its measures.
type drawing struct {
	*Chart
	about       []string
	left, scale float64 // where bars begin, and pixels a unit
	top, bottom int
	height      int
}

func wide(text string) float64 { return letter * float64(utf8.RuneCountInString(text)) }

// measure finds the scale: the longest bar with the text behind it fits.
func (d *drawing) measure() {
	if d.About != "" {
		d.about = wrap(d.About, lineLetters)
	}
	label := 0.0
	for _, x := range d.Bars {
		label = max(label, min(nameLetters*letter, wide(x.Name)))
	}
	d.left = chartMargin + label + 10
	room := chartWidth - chartMargin - d.left
	d.scale = 1e300
	fit := func(value, text float64) {
		if value > 0 {
			d.scale = min(d.scale, max(40, room-text)/value)
		}
	}
	if d.Limit != nil {
		fit(d.Limit.Value, 4)
	}
	for range 2 { // a smaller scale can move a text behind the line, which takes more space
		for i := range d.Bars {
			fit(max(d.end(&d.Bars[i]), d.Bars[i].Before), d.Bars[i].behind()+10)
		}
	}
	if d.scale == 1e300 {
		d.scale = 1
	}
	d.top = 46 + 17*len(d.about)
	if d.Limit != nil {
		d.top += 22
	}
	d.bottom = d.top + rowHeight*len(d.Bars) - 6
	d.height = d.bottom + 14
}

// behind is how much space the texts behind a bar take.
func (x *Bar) behind() float64 {
	return wide(strings.Join(append([]string{x.Text}, x.more()...), "  "))
}

// end is the value behind which the text of a bar stands: across no mark and no line.
func (d *drawing) end(x *Bar) float64 {
	end := max(x.Value, x.Floor)
	if d.Limit != nil && end < d.Limit.Value && d.scale*(d.Limit.Value-end) < x.behind()+10 {
		return d.Limit.Value
	}
	return end
}

// bar draws one bar with its texts.
func (d *drawing) bar(b *strings.Builder, i int) {
	x, y := &d.Bars[i], d.top+rowHeight*i
	class := "own"
	if x.Other {
		class = "other"
	}
	fmt.Fprintf(b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"end\">%s</text>\n", d.left-8, y+14, xmlText(shorten(x.Name, nameLetters)))
	fmt.Fprintf(b, "<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", class, d.left, y, d.scale*max(0, x.Value), barHeight)
	if x.Before > 0 {
		fmt.Fprintf(b, "<rect class=\"was\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", d.left, y+barHeight+1, d.scale*x.Before, thinHeight)
	}
	if x.Floor > 0 {
		fmt.Fprintf(b, "<path class=\"floor\" d=\"M%.1f %dv%d\"/>\n", d.left+d.scale*x.Floor, y-3, barHeight+6)
	}
	fmt.Fprintf(b, "<text x=\"%.1f\" y=\"%d\">%s", d.left+d.scale*d.end(x)+7, y+14, xmlText(x.Text))
	for _, more := range x.more() {
		fmt.Fprintf(b, "<tspan class=\"dim\" dx=\"8\">%s</tspan>", xmlText(more))
	}
	b.WriteString("</text>\n")
}

// limit draws the line, with its name above it.
func (d *drawing) limit(b *strings.Builder) {
	x := d.left + d.scale*d.Limit.Value
	at, anchor := x, "middle"
	switch half := wide(d.Limit.Name) / 2; {
	case x+half > chartWidth-chartMargin:
		at, anchor = x+4, "end"
	case x-half < chartMargin:
		at, anchor = x-4, "start"
	}
	fmt.Fprintf(b, "<path class=\"limit\" d=\"M%.1f %dV%d\"/>\n<text class=\"dim\" x=\"%.1f\" y=\"%d\" text-anchor=\"%s\">%s</text>\n",
		x, d.top-8, d.bottom, at, d.top-14, anchor, xmlText(d.Limit.Name))
}

// wrap divides text into lines of at most n letters.
func wrap(text string, n int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > n {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

func shorten(text string, n int) string {
	if r := []rune(text); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return text
}

// escaped does what package html does, which brings a table of all entities along.
var escaped = strings.NewReplacer("&", "&amp;", "'", "&#39;", "<", "&lt;", ">", "&gt;", `"`, "&#34;")

// xmlText makes any text one of XML and HTML: no mark-up, no character that they
// forbid.
func xmlText(text string) string {
	return escaped.Replace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == utf8.RuneError || r >= 0xfffe && r <= 0xffff {
			return '�'
		}
		return r
	}, text))
}
