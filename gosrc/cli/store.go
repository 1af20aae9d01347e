package cli

// This file prints presigned URLs.

import (
	"fmt"
	"io"
	"time"

	"github.com/overwire/overwire/gosrc/source/open"
)

// printPresigned prints a presigned URL of an object instead of downloading it.
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
