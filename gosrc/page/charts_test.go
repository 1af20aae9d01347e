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
	names := []string{"", "a", "</td><script>alert(1)</script>", "\x00\x1b&\"'", strings.Repeat("W", 300), "重み"}
	for range 300 {
		c := Chart{Title: names[rng.IntN(len(names))], About: names[rng.IntN(len(names))]}
		for range rng.IntN(6) {
			v := figure()
			c.Bars = append(c.Bars, Bar{Name: names[rng.IntN(len(names))], Value: v, Text: fmt.Sprint(v),
				Floor: figure(), Before: figure()})
		}
		var b strings.Builder
		c.writeTo(&b)
		styles := 0
		for d := xml.NewDecoder(strings.NewReader(b.String())); ; {
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
			if e.Name.Local == "script" {
				t.Fatal("a text is an element")
			}
			for _, a := range e.Attr {
				if a.Name.Local != "style" {
					continue
				}
				styles++
				_, number, _ := strings.Cut(strings.TrimSuffix(a.Value, "%"), ":")
				if share, err := strconv.ParseFloat(number, 64); err != nil || share < 0 || share > 100 {
					t.Fatalf("a bar ends at %s: %+v", a.Value, c)
				}
			}
		}
		if styles < len(c.Bars) {
			t.Fatalf("%d bars of %d", styles, len(c.Bars))
		}
	}
}
