package page

// This file makes the page of several charts: the figures of one run.

import (
	"fmt"
	"strings"
)

// Charts returns a page with charts below one another, each with a table of the same
// figures. Lines stand below the title.
func Charts(title string, lines []string, charts []Chart) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "<h1>%s</h1>\n", xmlText(title))
	for _, line := range lines {
		fmt.Fprintf(&b, "<p>%s</p>\n", xmlText(line))
	}
	for i := range charts {
		c := &charts[i]
		fmt.Fprintf(&b, "<section aria-label=\"%s\">\n<div class=\"wide chart\">\n%s</div>\n", xmlText(c.Title), c.SVG(fmt.Sprintf("chart%d", i)))
		c.table(&b)
		b.WriteString("</section>\n")
	}
	body := "<style>\n.chart svg { display: block; width: 100%; min-width: 600px; max-width: 900px; height: auto; }\nsection { margin: 20px 0; }\n" +
		"details { max-width: 900px; } summary { cursor: pointer; color: var(--dim); padding: 4px 0; }\n</style>\n" + b.String()
	return []byte(strings.Replace(static("@figures@"), "@figures@", body, 1))
}

// table writes the figures of a chart as a table, without columns that are empty.
func (c *Chart) table(b *strings.Builder) {
	cells := [][]string{{"figure"}, {c.Unit}, {"beside it"}, {"before"}, {"note"}}
	for _, x := range c.Bars {
		for i, text := range []string{x.Name, x.Text, x.FloorText, x.BeforeText, x.Note} {
			cells[i] = append(cells[i], text)
		}
	}
	fmt.Fprintf(b, "<details><summary>%s as a table</summary><div class=\"wide\"><table><caption>%s</caption>\n", xmlText(c.Title), xmlText(c.About))
	for row := range cells[0] {
		b.WriteString("<tr>")
		for i, column := range cells {
			if i > 1 && strings.Join(column[1:], "") == "" {
				continue
			}
			switch {
			case row == 0:
				fmt.Fprintf(b, "<th scope=\"col\">%s</th>", xmlText(column[row]))
			case i == 0:
				fmt.Fprintf(b, "<th scope=\"row\">%s</th>", xmlText(column[row]))
			default:
				fmt.Fprintf(b, "<td>%s</td>", xmlText(column[row]))
			}
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("</table></div></details>\n")
}
