// Package page makes one-file HTML pages of what the command line reports:
// they ask no server, and a text of a model is nowhere mark-up or script.
package page

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/verify"
)

// Every page is the frame with the style of all, and a body that has the script of
// all, and in it the data.
var (
	//go:embed frame.html
	frame string
	//go:embed page.css
	style string
	//go:embed page.js
	script string

	//go:embed model.html
	modelBody string
)

// assemblePage makes a page of a body, in which @data@ is the place of the data.
func assemblePage(body string, data any) ([]byte, error) {
	// Marshal writes <, > and & as \u003c ..., so that no name ends the element.
	text, err := json.Marshal(data)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "page: %v", err)
	}
	// The data come last: nothing in them is replaced.
	before, after, _ := strings.Cut(staticPage(body), "@data@")
	return bytes.Join([][]byte{[]byte(before), text, []byte(after)}, nil), nil
}

// staticPage is a page without its data.
func staticPage(body string) string {
	return strings.NewReplacer("@style@", style, "@body@", strings.Replace(body, "@script@", script, 1)).Replace(frame)
}

// columns are the tensors of a model as the page reads them: a list for each
// property, with repeated texts as numbers.
type columns struct {
	Files   []string `json:"files"`
	Names   []string `json:"names"`
	File    []int    `json:"file"`
	DTypes  []string `json:"dtypes"`
	DType   []int    `json:"dtype"`
	Shapes  []string `json:"shapes"` // "3,4"
	Bytes   []int64  `json:"bytes"`
	Stored  []int64  `json:"stored"`
	Codings []string `json:"codings"`
	Coding  []int    `json:"coding"`
}

// Model returns a page with the tensors of an inspection: a treemap by the parts of
// their names, and a table.
func Model(in *verify.Inspection) ([]byte, error) {
	c := columns{Files: []string{}, Names: []string{}, File: []int{}, DTypes: []string{}, DType: []int{},
		Shapes: []string{},
		Bytes:  []int64{}, Stored: []int64{}, Codings: []string{}, Coding: []int{}}
	dtypes, codings := map[string]int{}, map[string]int{}
	for i, f := range in.Sources {
		c.Files = append(c.Files, f.URI)
		for _, t := range f.Tensors {
			c.Names, c.File = append(c.Names, t.Name), append(c.File, i)
			c.DType = append(c.DType, numberOf(&c.DTypes, dtypes, t.DType))
			c.Shapes = append(c.Shapes, shapeText(t.Shape))
			c.Bytes, c.Stored = append(c.Bytes, t.Bytes), append(c.Stored, t.Stored)
			c.Coding = append(c.Coding, numberOf(&c.Codings, codings, t.Coding))
		}
	}
	return assemblePage(modelBody, c)
}

// numberOf is a text's place in a list, where it is added at its first use.
func numberOf(list *[]string, known map[string]int, text string) int {
	at, ok := known[text]
	if !ok {
		at = len(*list)
		known[text], *list = at, append(*list, text)
	}
	return at
}

// shapeText is a shape as "3,4".
func shapeText(shape []int64) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(shape), "[]"), " ", ",")
}
