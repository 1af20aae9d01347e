package main

// This file measures tensorizer's files in S3, from a server on this machine.

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
)

// tensorsOfS3 measures loads from S3, from a server on this machine: versitygw, if
// PATH has it. It uses cores of both sides.
func (r *run) tensorsOfS3(name, file string, total int64) error {
	program, err := exec.LookPath("versitygw")
	if err != nil {
		r.Missing("tensors", name, "needs versitygw on PATH (`make build/bin/versitygw` compiles it)")
		return nil
	}
	url, stop, err := r.startS3(program)
	if err != nil {
		return err
	}
	defer stop()
	const uri = "s3://models/theirs.tensors"
	if res, err := r.python("tensors", "upload", file, uri, url, benchKey); err != nil || res.Missing != "" {
		if err == nil {
			r.Missing("tensors", name, res.Missing)
		}
		return err
	}
	return r.runVersus(name, total, versus{"", 3,
		func(m string) []string { return []string{"tensors", "s3", m, uri, url, benchKey} }}, "")
}

// startS3 starts a server with a bucket "models", whose key and secret are
// benchKey. stop ends it.
func (r *run) startS3(program string) (url string, stop func(), err error) {
	root := r.Path("s3")
	for _, dir := range []string{"iam", "data/models"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			return "", nil, errs.FromOS(err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		return "", nil, errs.FromOS(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	ctx, cancel := context.WithCancel(r.Ctx)
	cmd := exec.CommandContext(ctx, program, "--port", addr, "--keep-alive", "--quiet", "--iam-dir",
		filepath.Join(root, "iam"), "posix", filepath.Join(root, "data"))
	cmd.Env = append(cmd.Environ(), "ROOT_ACCESS_KEY="+benchKey, "ROOT_SECRET_KEY="+benchKey)
	if err := cmd.Start(); err != nil {
		cancel()
		return "", nil, errs.New(errs.ErrEngine, "%s: %v", program, err)
	}
	stop = func() {
		cancel()
		_ = cmd.Wait()
		_ = os.RemoveAll(root)
	}
	for until := time.Now().Add(20 * time.Second); time.Now().Before(until) &&
		r.Stopped() == nil; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			return "http://" + addr, stop, nil
		}
	}
	stop()
	return "", nil, errs.New(errs.ErrEngine,
		"%s did not begin to answer at %s (it needs a folder with extended attributes)", program, addr)
}
