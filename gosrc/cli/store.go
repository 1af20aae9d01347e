package cli

// This file prints presigned URLs of objects, and checks objects before they are written.

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

// printPresigned prints a URL instead of the object's bytes.
func (c *call) printPresigned() error {
	if c.opts["output"] != "" || len(c.args) != 1 {
		return usage("--presign prints a URL of one s3://BUCKET/KEY, and takes no -o")
	}
	seconds := c.number("presign", 0)
	url, err := open.Presign(c.ctx, c.args[0], c.storage.Options, time.Duration(seconds)*time.Second)
	if err != nil {
		return err
	}
	answer := struct {
		URL     string `json:"url"`
		Expires int    `json:"expires"`
	}{url, seconds}
	return c.show(answer, func(w io.Writer) { fmt.Fprintln(w, url) })
}

// refuseExistingRemote returns an error if out is an existing object or a non-empty folder.
func (c *call) refuseExistingRemote(out string) error {
	exists := usage("%s exists; give --force to replace it", errs.RedactURI(out))
	if !source.Folder(out) {
		s, err := open.With(c.storage.Options).Open(c.ctx, out)
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
