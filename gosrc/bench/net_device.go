package bench

import (
	"fmt"
	"path/filepath"

	"github.com/overwire/overwire/gosrc/serve"
)

// netDevice measures loads to the device over HTTP, in processes of their own,
// from a server in this one, beside what TCP alone carries between the two ends
// of the loopback into memory that is there already.
func (r *run) netDevice(m *model) error {
	dir := filepath.Dir(filepath.Dir(m.files[plain][0]))
	s, err := serve.New(dir, serve.Options{})
	if err != nil {
		return err
	}
	defer s.Close()
	tcp, err := r.bestTCP(m.files[plain][0], []int{4, 8, 16, 32}, nil)
	if err != nil {
		return err
	}
	r.add(Row{Group: "net", Name: "raw TCP over the loopback, nobody looks at the bytes", Value: tcp, Unit: "GB/s"})
	urls := map[variant][]string{}
	for v, files := range m.files {
		for _, f := range files {
			urls[v] = append(urls[v], s.URL()+string(v)+"/"+filepath.Base(f))
		}
	}
	variants := []variant{packed, plain}
	var tasks []task
	for _, v := range variants {
		tasks = append(tasks, task{"verify " + string(v), v, append([]string{"verify", r.opt.Device, m.sums}, urls[v]...)})
	}
	for range r.opt.Repeat {
		for _, v := range variants {
			tasks = append(tasks, task{string(v), v, append([]string{"load", r.opt.Device}, urls[v]...)})
		}
	}
	all := r.taskTurns(m, tasks, nil)
	for _, v := range variants {
		o := all[string(v)]
		for _, err := range []error{all["verify "+string(v)].err, o.err} {
			if err != nil {
				r.step("net", m.name(v)+" over HTTP", func() error { return err })
			}
		}
		if len(o.results) == 0 || all["verify "+string(v)].err != nil {
			continue
		}
		for _, w := range whichLoad {
			row := Row{Group: "net", Name: fmt.Sprintf("%s over HTTP: %s", m.name(v), w.name), Unit: "GB/s"}
			o.spread(&row, func(res deviceResult) float64 { return rate(res.Bytes, w.of(res)) })
			row.Floor, row.FloorName = tcp, "raw TCP"
			if v == packed {
				row.Floor, row.FloorName = tcp/m.ratio, fmt.Sprintf("raw TCP / %.3f", m.ratio)
				if wire, name := r.limit(m, v); r.gpu != nil && wire > 0 && wire < row.Floor {
					row.Floor, row.FloorName = wire, name
				}
				r.goal(&row, ">= 40 GB/s, or 0.85 of it", atLeast(row.Value, min(40, 0.85*row.Floor)))
			}
			r.add(row)
		}
	}
	return nil
}
