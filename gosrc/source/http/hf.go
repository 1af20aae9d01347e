package http

import (
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
)

// hub turns hf:// into the URL of the hub, and finds the user's token where
// huggingface_hub keeps it: the options, HF_TOKEN, the file of a login.
func hub(uri string, opt source.Options) (string, source.Options, error) {
	r, ok := source.ParseHF(uri)
	if !ok || r.Repo == "" || r.File == "" || strings.HasSuffix(r.File, "/") {
		return "", opt, fault.New(fault.ErrArgument, "expected hf://organisation/name/file@revision")
	}
	for _, part := range strings.Split(r.Repo+"/"+r.File, "/") {
		if part == "" || part == "." || part == ".." {
			return "", opt, fault.New(fault.ErrArgument, "%q in a name of the hub", part)
		}
	}
	if r.Rev == "" {
		r.Rev = "main"
	}
	if opt.Storage["token"] == "" {
		if t := login(opt.Env); t != "" {
			storage := map[string]string{"token": t}
			for k, v := range opt.Storage {
				if k != "token" {
					storage[k] = v
				}
			}
			opt.Storage = storage
		}
	}
	endpoint := strings.TrimRight(opt.Env["HF_ENDPOINT"], "/")
	if endpoint == "" {
		endpoint = "https://huggingface.co"
	}
	return endpoint + "/" + escape(r.Repo) + "/resolve/" + url.PathEscape(r.Rev) + "/" + escape(r.File), opt, nil
}

func escape(path string) string {
	parts := strings.Split(path, "/")
	for i := range parts {
		parts[i] = url.PathEscape(parts[i])
	}
	return strings.Join(parts, "/")
}

func login(env map[string]string) string {
	if t := strings.TrimSpace(env["HF_TOKEN"]); t != "" {
		return t
	}
	home := env["HF_HOME"]
	if home == "" {
		user := env["HOME"]
		if user == "" {
			return ""
		}
		home = filepath.Join(user, ".cache", "huggingface")
	}
	b, err := os.ReadFile(filepath.Join(home, "token"))
	if err != nil {
		return "" // not logged in
	}
	return strings.TrimSpace(string(b))
}
