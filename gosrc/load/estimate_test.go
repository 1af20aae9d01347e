package load

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/plan"
)

// Besides its tensors, a load needs the estimated memory: none for mapped files, and a ring of slots for other files.
func TestEstimateStages(t *testing.T) {
	plain, _ := write(t, "a", []int64{3, 5}, []int64{1_300_001}, []int64{0, 4}, []int64{7})
	stored, _ := packed(t)
	off := false
	for _, c := range []struct {
		name string
		spec Spec
		none bool
	}{{"mapped", Spec{URIs: []string{plain}}, true}, {"read", Spec{URIs: []string{plain}, Map: &off}, false},
		{"compressed", Spec{URIs: []string{stored}}, false}} {
		m := opened(t, c.spec)
		o, err := EstimateMemory(m, nil, Prospect{Device: "cpu"})
		if err != nil {
			t.Fatal(err)
		}
		var all int64
		for i, x := range m.Index().Tensors {
			all += x.Bytes
			if o.Bytes[i] != x.Bytes {
				t.Errorf("%s: %q takes %d bytes, not %d", c.name, x.Name, x.Bytes, o.Bytes[i])
			}
		}
		if o.Peak != all || o.Pinned != 0 || o.Windows != nil {
			t.Errorf("%s: %+v of %d bytes", c.name, o, all)
		}
		l, rep := ended(t, m, Options{Device: "cpu"})
		l.Close()
		// Slots are rounded to pages, a queue to huge pages.
		if ring := rep.Stages.RingBytes; (o.Staging == 0) != (ring == 0) || (o.Staging == 0) != c.none ||
			o.Staging > ring || ring > o.Staging+4<<20 {
			t.Errorf("%s: a ring of %d bytes, estimated %d", c.name, ring, o.Staging)
		}
	}
	settled(t)
}

// A load over budget is refused with an error that names the sizes and the largest tensor. Invalid parts give an error.
// Estimating a load to a GPU needs no GPU.
func TestEstimateBudget(t *testing.T) {
	path, _ := write(t, "a", []int64{3, 5}, []int64{1000}, []int64{0, 4}, []int64{80})
	m := opened(t, Spec{URIs: []string{path}})
	for _, c := range []struct {
		parts []Part
		q     Prospect
		class error
		text  string
	}{
		{nil, Prospect{Budget: 1095}, nil, ""},
		{nil, Prospect{Budget: 1094, Device: "cpu"}, errs.ErrMemory, "4 tensors take 1095 bytes on cpu, 1 over max_memory of 1094; the largest is 'a.t1' with 1000"},
		{[]Part{{Tensor: 1, Elements: 500}, {Tensor: 3, Elements: -1}}, Prospect{Budget: 580}, nil, ""},
		{[]Part{{Tensor: 1, Elements: 500}, {Tensor: 3, Elements: -1}}, Prospect{Budget: 579}, errs.ErrMemory, "2 tensors take 580 bytes"},
		{[]Part{}, Prospect{Budget: 1}, nil, ""},
		{nil, Prospect{Budget: 1000, Stream: true}, nil, ""},
		{nil, Prospect{Budget: 999, Stream: true}, errs.ErrMemory, "'a.t1' takes 1000 bytes"},
		{nil, Prospect{Stream: true}, errs.ErrArgument, ""},
		{nil, Prospect{Budget: -1}, errs.ErrArgument, ""},
		{nil, Prospect{Item: -1}, errs.ErrArgument, ""},
		{nil, Prospect{DType: "F33"}, errs.ErrArgument, "F33"},
		{[]Part{{Tensor: 4, Elements: -1}}, Prospect{}, errs.ErrArgument, ""},
		{[]Part{{Tensor: -1, Elements: -1}}, Prospect{}, errs.ErrArgument, ""},
		{[]Part{{Tensor: 1, Elements: 1001}}, Prospect{}, errs.ErrArgument, "invalid number of elements 1001"},
		{[]Part{{Tensor: 1, Elements: math.MinInt64}}, Prospect{}, errs.ErrArgument, ""},
		{[]Part{{Tensor: 1, Elements: math.MaxInt64}}, Prospect{}, errs.ErrArgument, ""},
	} {
		o, err := EstimateMemory(m, c.parts, c.q)
		var at *errs.At
		switch {
		case !errors.Is(err, c.class) || c.class != nil && !strings.Contains(err.Error(), c.text):
			t.Errorf("%v %+v: %v", c.parts, c.q, err)
		case c.class == errs.ErrMemory && (!errors.As(err, &at) || at.Tensor != "a.t1" || at.Source == ""):
			t.Errorf("%v %+v: no location: %v", c.parts, c.q, err)
		case c.q.Stream && err == nil:
			n := 0
			for _, w := range o.Windows {
				n += w.Tensors
			}
			if n != 4 {
				t.Errorf("%v", o.Windows)
			}
		}
	}
	o, err := EstimateMemory(m, []Part{{Tensor: 3, Elements: plan.Whole}}, Prospect{Device: "cuda:3"})
	if err != nil || o.Staging < 1<<20 || o.Pinned != o.Staging {
		t.Errorf("%+v, %v", o, err)
	}
}
