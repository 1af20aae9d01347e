package http

// This file lists the files of an hf:// repository.

import (
	"cmp"
	"context"
	"encoding/json"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// maxListing is the largest file list that is read from a server, in bytes.
const maxListing = 64 << 20

// inFolder returns the files below a folder of a repository, sorted, with names relative to it.
func inFolder(all []source.Entry, folder string) (files []source.Entry) {
	for _, f := range all {
		name, ok := strings.CutPrefix(f.Name, folder)
		if ok && name != "" && filepath.IsLocal(name) && !strings.ContainsAny(name, "\\\x00") {
			files = append(files, source.Entry{Name: name, Size: f.Size})
		}
	}
	slices.SortFunc(files, func(a, b source.Entry) int { return strings.Compare(a.Name, b.Name) })
	return files
}

// listFiles requests the list of files of a repository and the commit that contains them.
//
// Source: Hugging Face Hub API, GET /api/models/REPO/revision/REVISION?blobs=true.
func listFiles(ctx context.Context, ref source.HF, file string, opt source.Options) (commit string,
	files []source.Entry, err error) {
	_, opt, err = hubURL(file, opt) // checks the repository's name
	if err != nil {
		return "", nil, err
	}
	kind, repo := kindOf(ref.Repo)
	address := hubEndpoint(opt.Env) + "/api/" + kind + "/" + source.EscapePath(repo) + "/revision/" +
		url.PathEscape(cmp.Or(ref.Rev, "main")) + "?blobs=true"
	opt.Outline = source.Outline{Most: maxListing}
	s, err := openScheme(ctx, address, opt, nil)
	if err != nil {
		return "", nil, err
	}
	defer s.Close()
	if s.Size() > maxListing {
		return "", nil, errs.New(errs.ErrFormat, "the Hub's file list has %d bytes: expected at most %d", s.Size(),
			maxListing)
	}
	text := make([]byte, s.Size())
	if err := s.ReadAt(ctx, text, 0); err != nil {
		return "", nil, err
	}
	var answer struct {
		SHA      string `json:"sha"`
		Siblings []struct {
			Name string `json:"rfilename"`
			Size *int64 `json:"size"`
		} `json:"siblings"`
	}
	if err := json.Unmarshal(text, &answer); err != nil || answer.SHA != "" && !IsCommit(answer.SHA) {
		return "", nil, errs.New(errs.ErrIO, "the Hub's response is not a list of files")
	}
	for _, f := range answer.Siblings {
		e := source.Entry{Name: f.Name, Size: -1}
		if f.Size != nil && *f.Size >= 0 {
			e.Size = *f.Size
		}
		files = append(files, e)
	}
	return answer.SHA, files, nil
}

// shelvedFiles returns the files of a snapshot in the huggingface_hub cache.
func shelvedFiles(snapshot string) (files []source.Entry) {
	_ = filepath.WalkDir(snapshot, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		name, relErr := filepath.Rel(snapshot, path)
		if st, err := os.Stat(path); relErr == nil && err == nil && isFile(path) {
			files = append(files, source.Entry{Name: filepath.ToSlash(name), Size: st.Size()})
		}
		return nil
	})
	return files
}
