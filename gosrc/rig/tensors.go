package main

// This file measures tensorizer's files beside tensorizer.

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/internal/spawn"
	"github.com/overwire/overwire/gosrc/measure"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/tensorizer"
)

// benchKey encrypts the files of these rows.
var benchKey = strings.Repeat("5a", 32)

const tensorsMost = 1 << 30 // bytes of the CPU rows

// tensors measures tensorizer's files beside tensorizer itself, by the same calls
// in fresh processes, alternating, and its cipher beside libsodium.
func (r *run) tensors() error {
	if err := r.cipherRate(); err != nil {
		return err
	}
	const group = "tensors"
	in, total, err := r.Make("llama-bf16", min(r.Size, tensorsMost), 6)
	if err != nil {
		return err
	}
	plain := r.Path("of.safetensors")
	if _, err := save.Write(r.Ctx, nil, save.Spec{Path: plain, Threads: r.Threads}, in); err != nil {
		return err
	}
	in = nil
	freeMemory()
	name := func(what string) string { return fmt.Sprintf("%.1f GB .tensors: %s", float64(total)/1e9, what) }
	// Both write, each reads the other's, every byte is compared; the files stay
	// for the rows.
	ours, theirs, sealed, words := r.Path("ours.tensors"), r.Path("theirs.tensors"), r.Path("sealed.tensors"),
		r.Path("words.tensors")
	res, err := r.python("tensors", "check", plain, ours, theirs, sealed, words, benchKey)
	if err != nil {
		return err
	}
	if res.Missing != "" {
		r.Missing(group, name("all rows"), res.Missing)
		return nil
	}
	sha, err := r.sha256Rate()
	if err != nil {
		return err
	}
	if err := r.verifyTensors(name("overwire verify"), theirs, total, sha); err != nil {
		return err
	}
	reading := func(file, how string) func(string) []string {
		return func(m string) []string { return []string{"tensors", "read", m, file, how, benchKey} }
	}
	writing := func(how string) func(string) []string {
		return func(m string) []string {
			return []string{"tensors", "write", m, plain, r.Path("written.tensors"), how, benchKey}
		}
	}
	rows := []versus{
		{"TensorDeserializer, every byte then read", 1, reading(theirs, "plain")},
		{"the same, verify_hash=True", 1, reading(theirs, "hash")},
		{"the same, encrypted", 1.3, reading(sealed, "key")},
		{"the same, encrypted by a password", 1, reading(words, "password")},
		{"TensorSerializer", 1.5, writing("plain")},
		{"TensorSerializer, encrypted", 1.5, writing("key")},
	}
	for _, row := range rows {
		note := ""
		if strings.Contains(row.what, "hash") {
			note = fmt.Sprintf("SHA-256 alone on %d cores: %.2f GB/s", r.Threads, sha)
		}
		if err := r.runVersus(name(row.what), total, row, note); err != nil {
			return err
		}
	}
	return r.tensorsOfS3(name("TensorDeserializer of S3 (versitygw)"), theirs, total)
}

// A versus is something that both sides do, with the arguments of
// workers/rig_tensors.py, and how many times faster than theirs ours should be.
type versus struct {
	what string
	goal float64
	args func(module string) []string
}

// runVersus runs both sides, alternating.
func (r *run) runVersus(name string, total int64, v versus, note string) error {
	s, notes, missing, err := r.runTurns(v.args("ours"), v.args("theirs"))
	if err != nil {
		return err
	}
	if missing != "" {
		r.Missing("tensors", name, missing)
		return nil
	}
	ours, theirs := measure.Rate(total, s[0]), measure.Rate(total, s[1])
	r.Add(measure.Row{Group: "tensors", Name: name, Value: ours, Unit: "GB/s", Floor: theirs, FloorName: notes[1],
		Note: note,
		Goal: fmt.Sprintf(">= %.1f x theirs", v.goal), Reached: atLeast(ours, v.goal*theirs)})
	return nil
}

// verifyTensors measures `overwire verify` of a file with a SHA-256 for every
// tensor, beside SHA-256 alone.
func (r *run) verifyTensors(name, file string, total int64, sha float64) error {
	seconds, err := r.Median(func() error {
		_, err := save.Verify(r.Ctx, nil, []string{file}, format.Access{}, false)
		return err
	})
	if err != nil {
		return err
	}
	v := measure.Rate(total, seconds)
	r.Add(measure.Row{Group: "tensors", Name: name, Value: v, Unit: "GB/s", Floor: sha,
		FloorName: fmt.Sprintf("crypto/sha256 on %d cores", r.Threads),
		Goal:      ">= 1 x", Reached: atLeast(v, sha)})
	return nil
}

// cipherRate is one core's rate of encrypting, which is that of decrypting: the
// cipher and the authenticator over boxes of 2 MiB.
func (r *run) cipherRate() error {
	const name = "XSalsa20-Poly1305, one core, boxes of 2 MiB in cache"
	box := make([]byte, tensorizer.ChunkBytes)
	c, key := tensorizer.NewCrypt(tensorizer.ChunkBytes, nil), new([32]byte)
	seconds, err := r.Median(func() error {
		for range 64 {
			c.Seal(box, 0, key)
		}
		return nil
	})
	if err != nil {
		return err
	}
	row := measure.Row{Group: "tensors", Name: name, Value: measure.Rate(64*tensorizer.ChunkBytes, seconds),
		Unit: "GB/s"}
	res, err := r.python("tensors", "sodium")
	switch {
	case err != nil:
		return err
	case res.Missing != "":
		row.Note = res.Missing
	default:
		row.Floor, row.FloorName = measure.Rate(64*tensorizer.ChunkBytes, res.Seconds), res.Note
	}
	r.Add(row)
	return nil
}

// sha256Rate is the rate of SHA-256 on all cores, of memory in their caches.
func (r *run) sha256Rate() (float64, error) {
	const piece, rounds = 64 << 10, 512
	seconds, err := r.Median(func() error {
		return spawn.Each(context.Background(), "bench", r.Threads, r.Threads, func(int) error {
			h, p := sha256.New(), make([]byte, piece)
			for range rounds {
				_, _ = h.Write(p) // cannot fail
			}
			return nil
		})
	})
	return measure.Rate(int64(r.Threads)*piece*rounds, seconds), err
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
		{"llama-bf16", r.Size, []string{"plain", "crc32", "key"}},
		{"moe-bf16", r.Size / 100 * 77, []string{"plain"}},
	} {
		if err := r.deviceTensorsOf(x.kind, x.size, x.hows); err != nil {
			return err
		}
	}
	return nil
}

// deviceGoals are rates on a wire of 55 GB/s.
var deviceGoals = map[string]float64{"llama-bf16 plain": 50, "llama-bf16 crc32": 48, "llama-bf16 key": 20,
	"moe-bf16 plain": 40}

func (r *run) deviceTensorsOf(kind string, size int64, hows []string) error {
	dir := r.Path("tensors")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	in, total, err := r.Make(kind, size, 4)
	if err != nil {
		return err
	}
	m := &model{kind: kind, bytes: total, tensors: len(in), sums: filepath.Join(dir, "sums.json")}
	what := fmt.Sprintf("%.1f GB %s, %d tensors, ", float64(m.bytes)/1e9, kind, m.tensors)
	files := map[string]string{}
	for _, how := range hows {
		spec := save.Spec{Path: filepath.Join(dir, "plain.tensors"), Threads: r.Threads}
		if files[how] = spec.Path; how == "crc32" {
			continue // the same file
		}
		if how == "key" {
			spec.Path = filepath.Join(dir, "sealed.tensors")
			spec.Storage = format.Access{Encrypt: map[string]string{tensorizer.OptionKey: benchKey}}
			files[how] = spec.Path
		}
		rep, err := save.Write(r.Ctx, nil, spec, in)
		if err != nil {
			return err
		}
		speed := measure.Rate(m.bytes, rep.Seconds)
		r.Add(measure.Row{Group: "tensors", Name: what + how + ": written", Value: speed, Unit: "GB/s"})
	}
	if err := r.writeSums(filepath.Join("tensors", "sums.json"), in); err != nil {
		return err
	}
	in = nil
	freeMemory()
	var tasks []task
	for _, how := range hows {
		words := []string{"tensors-verify", r.opt.Device, m.sums, how, benchKey, files[how]}
		tasks = append(tasks, task{"verify " + how, variant(how), words})
	}
	for n := range r.Repeat {
		for _, how := range hows {
			tasks = append(tasks, task{how, variant(how), []string{"tensors", r.opt.Device, how, benchKey, files[how]}})
			if n == 0 && how != "crc32" {
				tasks = append(tasks, task{how + " peer", variant(how),
					[]string{"tensors-peer", r.opt.Device, how, benchKey, files[how]}})
			}
		}
	}
	outcomes := r.taskTurns(m, tasks, nil)
	for _, how := range hows {
		for _, who := range []string{"", " peer"} {
			o, name := outcomes[how+who], what+how
			if o == nil {
				continue
			}
			if who != "" {
				name = "tensorizer on the same file: " + name
			}
			err := o.err
			if v := outcomes["verify "+how]; err == nil && v != nil {
				err = v.err
			}
			if err != nil || len(o.results) == 0 {
				r.runStep("tensors", name, func() error { return err })
				continue
			}
			for _, w := range whichLoad {
				row := measure.Row{Group: "tensors", Name: name + ": " + w.name, Unit: "GB/s"}
				o.setSpread(&row, func(res deviceResult) float64 { return measure.Rate(res.Bytes, w.of(res)) })
				row.Floor, row.FloorName = r.linkLimit(m, plain)
				if goal := deviceGoals[kind+" "+how]; who == "" && goal > 0 && w.name == "second load" {
					r.goal(&row, fmt.Sprintf(">= %.0f on a wire of 55", goal), atLeast(row.Value, goal))
				}
				r.Add(row)
			}
		}
	}
	return nil
}
