// Command plots draws the figures of docs/benchmarks.md: it reads figures.json in the
// folder that it is given and writes an SVG beside it for each plot. `make plots`
// calls it.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/atomicfile"
	"github.com/overwire/overwire/gosrc/page"
)

// A number is a figure exactly as docs/benchmarks.md writes it.
type number string

func (n number) value() float64 {
	v, _ := strconv.ParseFloat(string(n), 64) // checked by read
	return v
}

// A figure says where it comes from: Line is a text of the one line of
// docs/benchmarks.md that has the number.
type figure struct {
	Name  string `json:"name"`
	Value number `json:"value"`
	First number `json:"first,omitempty"`
	Note  string `json:"note,omitempty"`
	Floor number `json:"floor,omitempty"`
	Other bool   `json:"other,omitempty"`
	Line  string `json:"line"`
}

// A plot is one file. How is the command that measured its figures.
type plot struct {
	File  string   `json:"file"`
	Title string   `json:"title"`
	About string   `json:"about"`
	How   string   `json:"how"`
	Unit  string   `json:"unit"`
	Limit *figure  `json:"limit"`
	Bars  []figure `json:"bars"`
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: plots FOLDER")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "plots:", err)
		os.Exit(1)
	}
}

// run writes the plots of a folder.
func run(folder string) error {
	all, err := read(folder)
	if err != nil {
		return err
	}
	for _, p := range all {
		if err := atomicfile.Write(context.Background(), filepath.Join(folder, p.File), []byte(p.draw())); err != nil {
			return err
		}
	}
	return nil
}

// read reads figures.json; an unknown key or a number that is none is an error.
func read(folder string) ([]plot, error) {
	text, err := os.ReadFile(filepath.Join(folder, "figures.json"))
	if err != nil {
		return nil, errs.New(errs.ErrNotFound, "%v", err)
	}
	var all struct {
		Plots []plot `json:"plots"`
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&all); err != nil {
		return nil, errs.New(errs.ErrFormat, "figures.json: %v", err)
	}
	for _, p := range all.Plots {
		for _, f := range p.figures() {
			for _, n := range f.numbers() {
				if _, err := strconv.ParseFloat(string(n), 64); err != nil {
					return nil, errs.New(errs.ErrFormat, "figures.json: %s: %s: %q is not a number", p.File, f.Name, n)
				}
			}
		}
	}
	return all.Plots, nil
}

// figures are the bars of a plot and its limit.
func (p *plot) figures() []figure {
	if p.Limit == nil {
		return p.Bars
	}
	return append([]figure{*p.Limit}, p.Bars...)
}

// numbers are those of a figure that are given.
func (f *figure) numbers() []number {
	out := []number{f.Value}
	for _, n := range []number{f.First, f.Floor} {
		if n != "" {
			out = append(out, n)
		}
	}
	return out
}

func (p *plot) draw() string {
	c := page.Chart{Title: p.Title, About: p.About, Unit: p.Unit}
	if p.Limit != nil {
		c.Limit = &page.Limit{Name: p.Limit.Name, Value: p.Limit.Value.value()}
	}
	for _, f := range p.Bars {
		bar := page.Bar{Name: f.Name, Value: f.Value.value(), Text: string(f.Value), Note: f.Note, Other: f.Other, Floor: f.Floor.value()}
		if f.First != "" {
			bar.Note = "(" + string(f.First) + ")"
		}
		c.Bars = append(c.Bars, bar)
	}
	return c.SVG(p.File[:len(p.File)-len(filepath.Ext(p.File))])
}
