// Package page renders reports of the command line as self-contained HTML pages. Texts from a model are never
// interpreted as markup or script.
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

// Every page consists of the frame with the common style, and a body with the common script and the data.
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

// assemblePage renders a page. @data@ in the body marks where the data is inserted.
func assemblePage(body string, data any) ([]byte, error) {
	// Marshal escapes <, > and & as \u003c ..., so no name can end the element.
	text, err := json.Marshal(data)
	if err != nil {
		return nil, errs.New(errs.ErrEngine, "page: %v", err)
	}
	// Insert the data last, so that markers in it are not replaced.
	before, after, _ := strings.Cut(staticPage(body), "@data@")
	return bytes.Join([][]byte{[]byte(before), text, []byte(after)}, nil), nil
}

// staticPage returns a page without its data.
func staticPage(body string) string {
	return strings.NewReplacer("@style@", style, "@body@", strings.Replace(body, "@script@", script, 1)).Replace(frame)
}

// columns has the tensors of a model in the page's form: one list per property. Repeated texts are replaced by
// their index.
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

// Model returns a page with the tensors of an inspection: a treemap of their names, and a table.
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

// numberOf returns the index of a text in a list, and appends the text at its first use.
func numberOf(list *[]string, known map[string]int, text string) int {
	at, ok := known[text]
	if !ok {
		at = len(*list)
		known[text], *list = at, append(*list, text)
	}
	return at
}

// shapeText formats a shape as "3,4".
func shapeText(shape []int64) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(shape), "[]"), " ", ",")
}
