package cli

// This file defines the diff command, which compares two models.

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/delta"
	"github.com/overwire/overwire/gosrc/device/cpu"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/tensor"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// diffBytes limits how much of each model diff loads at a time. A larger tensor is still loaded whole.
const diffBytes = 1 << 30

var diffVerb = &verb{
	name: "diff", args: "A B", least: 2, most: 2,
	short: "show what changed from model A to model B",
	long: `
Compares the tensors of two models (files, folders or index.json, plain or
compressed) bit by bit. For each tensor that differs it prints how many elements
changed, and the size of its delta (save_delta in Python). It also lists tensors that
are in only one of the models, or that differ in type or shape.
Elements smaller than a byte are counted as bytes. diff keeps at most about 2 GB of
tensors in memory, unless a single tensor is larger. If only one of the models is
encrypted, the key is used for that one. The exit status is 0 even if the models differ;
with --exit-code it is 1.`,
	example: "overwire diff base.safetensors tuned.safetensors",
	options: append([]option{{name: "exit-code", doc: "exit with 1 if the models differ"},
		{name: "summary", short: "s", doc: "print totals only, not each tensor"},
		{name: "limit", value: "N", lo: 1, hi: 1 << 30,
			doc: "list only the N tensors that changed most, and at most N names in each " +
				"list"}, threadsOption, storageOption},
		decryptOptions...),
	run: runDiff,
}

// diffReport is the JSON document that diff prints.
type diffReport struct {
	Tensors  []delta.Row `json:"tensors"` // tensors with changed elements
	Equal    int         `json:"equal"`
	OnlyA    []string    `json:"only_a"`
	OnlyB    []string    `json:"only_b"`
	Other    []string    `json:"other"` // tensors that differ in dtype or shape
	Elements int64       `json:"elements"`
	Changed  int64       `json:"changed"`
	Bytes    int64       `json:"bytes"`
	Stored   int64       `json:"stored"` // bytes of a delta's chunks
}

// difference is the error for --exit-code. Its exit status is 1, as with Unix diff and cmp.
type difference struct{}

func (difference) Error() string { return "the models differ" }

func (difference) Unwrap() error { return errs.ErrCorrupt }

func runDiff(c *call) error {
	models, err := openBoth(c)
	if err != nil {
		return err
	}
	for _, m := range models {
		defer m.Close()
	}
	r := diffReport{Tensors: []delta.Row{}, OnlyA: []string{}, OnlyB: []string{}, Other: []string{}}
	both := r.pairTensors(models[0].Index(), models[1].Index())
	for len(both) > 0 {
		n, sum := 0, int64(0)
		for n < len(both) && (n == 0 || sum+models[0].Index().Tensors[both[n][0]].Bytes <= diffBytes) {
			sum += models[0].Index().Tensors[both[n][0]].Bytes
			n++
		}
		if err := compareModels(c, &r, models, both[:n], c.threads()); err != nil {
			return err
		}
		both = both[n:]
	}
	err = c.show(r, func(w io.Writer) { r.print(w, c.is("summary"), c.number("limit", 0)) })
	if differ := len(r.Tensors)+len(r.OnlyA)+len(r.OnlyB)+len(r.Other) > 0; err == nil && differ && c.is("exit-code") {
		return &shownError{difference{}}
	}
	return err
}

// openBoth opens the two models. A key is used only for encrypted models. If there is a key but neither model is
// encrypted, openBoth returns an error.
func openBoth(c *call) (models [2]*load.Model, err error) {
	keyless := c.storage
	keyless.Decrypt = nil
	var first error // from opening an unencrypted model with the key
	for i, path := range c.args {
		models[i], err = openModel(c, []string{path}, c.storage)
		if _, ok := errors.AsType[*tensorizer.NotEncryptedError](err); ok && (i == 0 || first == nil) {
			first = err
			models[i], err = openModel(c, []string{path}, keyless)
		}
		if err != nil {
			if i > 0 {
				models[0].Close()
			}
			return models, err
		}
	}
	return models, nil
}

// pairTensors pairs the tensors of both models by name, and records those that have no
// counterpart of the same dtype and shape.
func (r *diffReport) pairTensors(a, b *tensor.Index) (both [][2]int) {
	at := map[string]int{}
	for i := range b.Tensors {
		at[b.Tensors[i].Name] = i
	}
	for i := range a.Tensors {
		t := &a.Tensors[i]
		k, ok := at[t.Name]
		delete(at, t.Name)
		switch {
		case !ok:
			r.OnlyA = append(r.OnlyA, t.Name)
		case b.Tensors[k].DType != t.DType || !slices.Equal(b.Tensors[k].Shape, t.Shape):
			r.Other = append(r.Other, t.Name)
		default:
			both = append(both, [2]int{i, k})
		}
	}
	r.OnlyB = slices.AppendSeq(r.OnlyB, maps.Keys(at))
	slices.Sort(r.OnlyA)
	slices.Sort(r.OnlyB)
	slices.Sort(r.Other)
	return both
}

// compareModels loads a batch of tensors from both models, and records those that differ.
func compareModels(c *call, r *diffReport, models [2]*load.Model, some [][2]int, threads int) error {
	pairs := make([]delta.Pair, len(some))
	for side, m := range models {
		tensors := make([]int, len(some))
		for i := range some {
			tensors[i] = some[i][side]
		}
		mem, err := m.LoadWhole(c.ctx, tensors, load.Options{Threads: threads})
		if err != nil {
			return err
		}
		defer cpu.Release(mem)
		for i := range pairs {
			at := uint64(uintptr(mem[i].Ptr))
			if side == 0 {
				t := &m.Index().Tensors[some[i][0]]
				pairs[i] = delta.Pair{Name: t.Name, DType: t.DType, Shape: t.Shape, Base: at}
			} else {
				pairs[i].New = at
			}
		}
	}
	rows, err := delta.Diff(c.ctx, pairs, threads, func(int64) {})
	if err != nil {
		return err
	}
	for _, row := range rows {
		r.Elements, r.Changed, r.Bytes, r.Stored = r.Elements+row.Elements, r.Changed+row.Changed, r.Bytes+row.Bytes,
			r.Stored+row.Stored
		if row.Changed == 0 {
			r.Equal++
		} else {
			r.Tensors = append(r.Tensors, row)
		}
	}
	return nil
}

// maxNames is how many names a line lists without --limit.
const maxNames = 8

// print prints the report. A limit above 0 is the maximum number of tensors to list.
func (r diffReport) print(w io.Writer, summary bool, limit int) {
	rows, names := r.Tensors, maxNames
	if limit > 0 {
		rows = slices.SortedStableFunc(slices.Values(rows), func(a, b delta.Row) int {
			return cmp.Compare(b.Changed, a.Changed)
		})
		rows, names = rows[:min(limit, len(rows))], limit
	}
	if summary {
		rows = nil
	}
	t := table(w)
	for i, row := range rows {
		if i == 0 {
			fmt.Fprintf(t, "tensor\tdtype\tshape\telements changed\tshare\tdelta\n")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", safe(row.Name), row.DType, shapeText(row.Shape),
			humanize.Comma(row.Changed), shareText(row.Changed, row.Elements), bytesText(row.Stored))
	}
	t.Flush()
	if n := len(r.Tensors) - len(rows); n > 0 && !summary {
		fmt.Fprintf(w, "and %s more (omit --limit or use --json to list all)\n", humanize.Comma(int64(n)))
	}
	for _, list := range []struct {
		what  string
		names []string
	}{{"only in A", r.OnlyA}, {"only in B", r.OnlyB}, {"different type or shape", r.Other}} {
		if n := len(list.names); n > 0 {
			more := ""
			if n > names {
				more = fmt.Sprintf(", and %s more (--json lists all)", humanize.Comma(int64(n-names)))
			}
			fmt.Fprintf(w, "%s: %s%s\n", list.what, safe(strings.Join(list.names[:min(n, names)], ", ")), more)
		}
	}
	if len(r.Tensors)+r.Equal == 0 {
		fmt.Fprintln(w, plural(min(1, len(r.Other)), "no tensor has the same type and shape in both models",
			"no tensor is in both models"))
		return
	}
	fmt.Fprintf(w, "%s of %s changed (%s) in %s; %d %s equal; a delta takes %s, %s of %s\n", humanize.Comma(r.Changed),
		countText(r.Elements, "element"), shareText(r.Changed, r.Elements), countText(len(r.Tensors), "tensor"),
		r.Equal, plural(r.Equal, "is", "are"), bytesText(r.Stored), shareText(r.Stored, r.Bytes), bytesText(r.Bytes))
}

func shareText(n, of int64) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f %%", 100*float64(n)/float64(of))
}
