package page

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// Promise: whatever the figures are, every bar and mark of a chart lies within it,
// and texts of any kind are texts.
func TestChartStaysInside(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	figure := func() float64 {
		if rng.IntN(4) == 0 {
			return 0
		}
		return math.Pow(10, rng.Float64()*12-6)
	}
	names := []string{"", "a", "</text><script>alert(1)</script>", "\x00\x1b&\"'", strings.Repeat("W", 300), "重み"}
	for range 300 {
		c := Chart{Title: names[rng.IntN(len(names))], About: names[rng.IntN(len(names))]}
		if rng.IntN(2) == 0 {
			c.Limit = &Limit{Name: names[rng.IntN(len(names)-2)], Value: figure()}
		}
		for range rng.IntN(6) {
			v := figure()
			c.Bars = append(c.Bars, Bar{Name: names[rng.IntN(len(names))], Value: v, Text: fmt.Sprint(v), Floor: figure(), Before: figure()})
		}
		d := xml.NewDecoder(strings.NewReader(c.SVG("a\"b")))
		for {
			token, err := d.Token()
			if err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
			e, ok := token.(xml.StartElement)
			if !ok {
				continue
			}
			at := map[string]float64{}
			for _, a := range e.Attr {
				at[a.Name.Local], _ = strconv.ParseFloat(a.Value, 64)
			}
			switch e.Name.Local {
			case "script":
				t.Fatal("a text is an element")
			case "rect":
				if right := at["x"] + at["width"]; at["width"] < 0 || right > chartWidth {
					t.Fatalf("a bar ends at %g: %+v", right, c)
				}
			}
		}
	}
}
