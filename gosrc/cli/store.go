package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
)

var presignVerb = &verb{
	name: "presign", args: "s3://BUCKET/KEY", least: 1, most: 1,
	short: "make an https URL that reads an object without credentials, for a while",
	long: `
Signs a URL (version 4) with the credentials at hand, without asking the store.
Whoever has the URL can read the object until it expires: treat it as a secret.`,
	example: "overwire presign s3://models/m.safetensors --expires 3600",
	options: []option{
		{name: "expires", value: "SECONDS", doc: "life of the URL, at most 604800 (default: 3600)"},
		storageOption,
	},
	run: func(c *call) error {
		storage, err := c.storage()
		if err != nil {
			return err
		}
		seconds, err := c.number("expires", 3600, 1, 604800)
		if err != nil {
			return err
		}
		url, err := open.Presign(c.ctx, c.args[0], storage.Options, time.Duration(seconds)*time.Second)
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

// freeFar refuses to write over an object. Folders are Convert's to judge.
func (c *call) freeFar(out string, storage source.Options) error {
	if strings.HasSuffix(out, "/") {
		return nil
	}
	s, err := open.With(storage)(c.ctx, out)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	_ = s.Close()
	return usage("%s exists; give --force to write over it", out)
}
