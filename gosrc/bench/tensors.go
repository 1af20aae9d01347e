package bench

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/format/tensors"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/weights"
)

// benchKey encrypts the files of these rows.
var benchKey = strings.Repeat("5a", 32)

const tensorsMost = 1 << 30 // bytes of the CPU rows

// tensors measures tensorizer's files beside tensorizer itself, by the same calls
// in fresh processes by turns, and its cipher beside libsodium.
func (r *run) tensors() error {
	if err := r.cipher(); err != nil {
		return err
	}
	const group = "tensors"
	all, err := weights.Make(weights.Options{Kind: "llama-bf16", Size: min(r.opt.Size, tensorsMost), Seed: 6, Threads: r.opt.Threads})
	if err != nil {
		return err
	}
	in := inputs(all)
	var total int64
	for _, t := range in {
		total += int64(len(t.Data))
	}
	plain := r.path("of.safetensors")
	if _, err := save.Write(r.ctx, nil, save.Spec{Path: plain, Threads: r.opt.Threads}, in); err != nil {
		return err
	}
	all, in = nil, nil
	freeMemory()
	name := func(what string) string { return fmt.Sprintf("%.1f GB .tensors: %s", float64(total)/1e9, what) }
	// Both write, each reads the other's, every byte is compared; the files stay for the rows.
	ours, theirs, sealed := r.path("ours.tensors"), r.path("theirs.tensors"), r.path("sealed.tensors")
	res, err := r.python("tensors", "check", plain, ours, theirs, sealed, benchKey)
	if err != nil {
		return err
	}
	if res.Missing != "" {
		r.missing(group, name("all rows"), res.Missing)
		return nil
	}
	for _, row := range []struct {
		what string
		goal float64
		args func(module string) []string
	}{
		{"TensorDeserializer, every byte then read", 1, func(m string) []string { return []string{"tensors", "read", m, theirs, "plain", benchKey} }},
		{"the same, verify_hash=True", 1, func(m string) []string { return []string{"tensors", "read", m, theirs, "hash", benchKey} }},
		{"the same, encrypted", 1, func(m string) []string { return []string{"tensors", "read", m, sealed, "key", benchKey} }},
		{"TensorSerializer", 1.5, func(m string) []string {
			return []string{"tensors", "write", m, plain, r.path("written.tensors"), "plain", benchKey}
		}},
		{"TensorSerializer, encrypted", 1, func(m string) []string {
			return []string{"tensors", "write", m, plain, r.path("written.tensors"), "key", benchKey}
		}},
	} {
		s, notes, missing, err := r.turns(row.args("ours"), row.args("theirs"))
		if err != nil {
			return err
		}
		if missing != "" {
			r.missing(group, name(row.what), missing)
			continue
		}
		ours, theirs := rate(total, s[0]), rate(total, s[1])
		out := Row{Group: group, Name: name(row.what), Value: ours, Unit: "GB/s", Floor: theirs, FloorName: notes[1],
			Goal: fmt.Sprintf(">= %.1f x theirs", row.goal), Reached: atLeast(ours, row.goal*theirs)}
		if strings.Contains(row.what, "hash") {
			bound := r.sha256Rate() * float64(r.opt.Threads)
			out.Note = fmt.Sprintf("SHA-256 of that memory on %d cores by itself: %.2f GB/s", r.opt.Threads, bound)
		}
		r.add(out)
	}
	return nil
}

// cipher is one core's rate of encrypting, which is that of decrypting: the
// cipher and the authenticator over boxes of 2 MiB.
func (r *run) cipher() error {
	const name = "XSalsa20-Poly1305, one core, boxes of 2 MiB in cache"
	box := make([]byte, tensors.ChunkBytes)
	c, key := tensors.NewCrypt(tensors.ChunkBytes, nil), new([32]byte)
	seconds, err := r.median(func() error {
		for range 64 {
			c.Seal(box, 0, key)
		}
		return nil
	})
	if err != nil {
		return err
	}
	row := Row{Group: "tensors", Name: name, Value: rate(64*tensors.ChunkBytes, seconds), Unit: "GB/s"}
	res, err := r.python("tensors", "sodium")
	switch {
	case err != nil:
		return err
	case res.Missing != "":
		row.Note = res.Missing
	default:
		row.Floor, row.FloorName = rate(64*tensors.ChunkBytes, res.Seconds), res.Note
		row.Goal, row.Reached = ">= libsodium's", atLeast(row.Value, row.Floor)
	}
	r.add(row)
	return nil
}

// sha256Rate is one core's.
func (r *run) sha256Rate() float64 {
	b := make([]byte, 64<<20)
	start := time.Now()
	sha256.Sum256(b)
	return rate(int64(len(b)), time.Since(start).Seconds())
}

// deviceTensors measures loads of tensorizer's files to a device: plain, with
// their CRC32 compared on the way, encrypted, and very many tensors in one file;
// tensorizer beside us, on the same files.
func (r *run) deviceTensors() error {
	for _, x := range []struct {
		kind string
		size int64
		hows []string
	}{
		{"llama-bf16", r.opt.Size, []string{"plain", "crc32", "key"}},
		{"moe-bf16", r.opt.Size / 100 * 77, []string{"plain"}},
	} {
		if err := r.deviceTensorsOf(x.kind, x.size, x.hows); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) deviceTensorsOf(kind string, size int64, hows []string) error {
	dir := r.path("tensors")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	all, err := weights.Make(weights.Options{Kind: kind, Size: size, Seed: 4, Threads: r.opt.Threads})
	if err != nil {
		return err
	}
	in := inputs(all)
	m := &model{kind: kind, tensors: len(in), sums: filepath.Join(dir, "sums.json")}
	for _, t := range in {
		m.bytes += int64(len(t.Data))
	}
	files := map[string]string{}
	for _, how := range hows {
		spec := save.Spec{Path: filepath.Join(dir, "plain.tensors"), Threads: r.opt.Threads}
		if files[how] = spec.Path; how == "crc32" {
			continue // the same file
		}
		if how == "key" {
			spec.Path = filepath.Join(dir, "sealed.tensors")
			spec.Storage = source.Options{Encrypt: map[string]string{tensors.OptionKey: benchKey}}
			files[how] = spec.Path
		}
		rep, err := save.Write(r.ctx, nil, spec, in)
		if err != nil {
			return err
		}
		r.add(Row{Group: "tensors", Name: fmt.Sprintf("%.1f GB %s, %d tensors, %s: written", float64(m.bytes)/1e9, kind, m.tensors, how),
			Value: rate(m.bytes, rep.Seconds), Unit: "GB/s"})
	}
	if err := r.writeSums(filepath.Join("tensors", "sums.json"), in); err != nil {
		return err
	}
	all, in = nil, nil
	freeMemory()
	var tasks []task
	for _, how := range hows {
		tasks = append(tasks, task{"verify " + how, variant(how), []string{"tensors-verify", r.opt.Device, m.sums, how, benchKey, files[how]}})
	}
	for n := range r.opt.Repeat {
		for _, how := range hows {
			tasks = append(tasks, task{how, variant(how), []string{"tensors", r.opt.Device, how, benchKey, files[how]}})
			if n == 0 && how != "crc32" {
				tasks = append(tasks, task{how + " peer", variant(how), []string{"tensors-peer", r.opt.Device, how, benchKey, files[how]}})
			}
		}
	}
	outcomes := r.taskTurns(m, tasks, nil)
	goals := map[string]float64{"llama-bf16 plain": 50, "llama-bf16 crc32": 48, "llama-bf16 key": 20, "moe-bf16 plain": 40}
	for _, how := range hows {
		for _, who := range []string{"", " peer"} {
			o := outcomes[how+who]
			if o == nil {
				continue
			}
			name := fmt.Sprintf("%.1f GB %s, %d tensors, %s", float64(m.bytes)/1e9, kind, m.tensors, how)
			if who != "" {
				name = "tensorizer on the same file: " + name
			}
			err := o.err
			if v := outcomes["verify "+how]; err == nil && v != nil {
				err = v.err
			}
			if err != nil || len(o.results) == 0 {
				r.step("tensors", name, func() error { return err })
				continue
			}
			for _, w := range whichLoad {
				row := Row{Group: "tensors", Name: name + ": " + w.name, Unit: "GB/s"}
				o.spread(&row, func(res deviceResult) float64 { return rate(res.Bytes, w.of(res)) })
				row.Floor, row.FloorName = r.limit(m, plain)
				if goal := goals[kind+" "+how]; who == "" && goal > 0 && w.name == "second load" {
					r.goal(&row, fmt.Sprintf(">= %.0f on a wire of 55", goal), atLeast(row.Value, goal))
				}
				r.add(row)
			}
		}
	}
	return nil
}
