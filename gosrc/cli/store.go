package cli

// This file has the verb presign, and checks of objects to be written.

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/internal/modelfiles"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

var presignVerb = &verb{
	name: "presign", args: "s3://BUCKET/KEY", least: 1, most: 1,
	short: "make an https URL that reads an S3 object without credentials, for a while",
	long: `
Signs a URL (version 4) with the credentials at hand, without asking the store.
Anyone who has the URL can read the object until it expires: keep it secret.`,
	example: "overwire presign s3://models/m.safetensors --expires 3600",
	options: []option{
		{name: "expires", value: "SECONDS", lo: 1, hi: 604800, doc: "how long the URL is valid, at most 604800 (default: 3600)"},
		storageOption,
	},
	run: func(c *call) error {
		seconds := c.number("expires", 3600)
		url, err := open.Presign(c.ctx, c.args[0], c.storage.Options, time.Duration(seconds)*time.Second)
		if err != nil {
			return err
		}
		answer := struct {
			URL     string `json:"url"`
			Expires int    `json:"expires"`
		}{url, seconds}
		return c.show(answer, func(w io.Writer) { fmt.Fprintln(w, url) })
	},
}

// freeRemote refuses to replace an object, or to write into a folder that is not empty.
func (c *call) freeRemote(out string) error {
	exists := usage("%s exists; give --force to replace it", errs.RedactURI(out))
	if !source.Folder(out) {
		s, err := open.With(c.storage.Options)(c.ctx, out)
		if err == nil {
			_ = s.Close()
			return exists
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return err
		}
		if strings.HasSuffix(out, modelfiles.Extension) {
			return nil
		}
	}
	_, err := open.List(c.ctx, source.Directory(out), c.storage.Options)
	switch {
	case err == nil:
		return exists
	case errors.Is(err, errs.ErrNotFound), errors.Is(err, errs.ErrNotSupported):
		return nil
	}
	return err
}
