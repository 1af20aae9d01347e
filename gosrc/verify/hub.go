package verify

// This file compares files with the SHA-256 that the Hugging Face Hub reported for them. The Hub sends it with hf://
// files. For downloaded files, huggingface_hub stores it in both of its layouts: a cache uses it as the name of the
// blob, and a local folder has it in
// .cache/huggingface/download/FILE.metadata (three lines: commit, ETag, time of the download).

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/avx"
	"github.com/overwire/overwire/gosrc/internal/regular"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/save/original"
	"github.com/overwire/overwire/gosrc/source"
)

// hubSum returns the SHA-256 that the Hub reported for a local file, or "" if it is unknown. As in huggingface_hub, it
// is unknown if the file was written to after the download.
func hubSum(path string) string {
	path, err := filepath.Abs(path)
	if err != nil {
		return ""
	}
	blob, err := filepath.EvalSymlinks(path)
	if err != nil {
		return ""
	}
	if dir, name := filepath.Split(blob); filepath.Base(dir) == "blobs" && isSum(name) {
		return name
	}
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		name, _ := filepath.Rel(dir, path)
		text, err := regular.Read(filepath.Join(dir, ".cache", "huggingface", "download", name+".metadata"), 4<<10)
		lines := strings.Fields(string(text))
		if err == nil && len(lines) == 3 {
			seconds, err := strconv.ParseFloat(lines[2], 64)
			if err == nil && isSum(lines[1]) && float64(info.ModTime().UnixNano())/float64(time.Second)-1 <= seconds {
				return lines[1]
			}
			return ""
		}
		if dir == filepath.Dir(dir) {
			return ""
		}
	}
}

// isSum reports whether text is a SHA-256. The Hub's ETags of small files are Git hashes, which are shorter.
func isSum(text string) bool {
	_, err := hex.DecodeString(text)
	return err == nil && len(text) == 2*sha256.Size && text == strings.ToLower(text)
}

// compareHubSum compares a file with the SHA-256 that the Hub reported for it, and records the result in the report. If
// the SHA-256 is unknown, it does nothing. Memory use does not depend on the file's size.
func compareHubSum(ctx context.Context, j *job.Job, src source.Source, rep *Report, f *VerifiedFile) error {
	want := src.Facts().SHA256
	if path, local := source.Local(src.URI()); local {
		want = hubSum(path)
	}
	if want == "" {
		return nil
	}
	j.TotalBytes.Add(f.Bytes)
	sum := sha256.New()
	err := original.ReadBlocks(ctx, src, 0, src.Size(), func(b []byte) {
		avx.Clear()
		_, _ = sum.Write(b)
	})
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return errs.Place("verify", src.URI(), "", -1, errs.New(errs.ErrCorrupt,
			"the file differs from the one on the Hub: its SHA-256 is %s, expected %s: download it again", got, want))
	}
	f.Checked, f.SHA256 = "contents", want
	rep.Bytes += f.Bytes
	j.Bytes.Add(f.Bytes)
	return nil
}
