package http

// This file reads an object in order by one GET, if the server does not support ranges or sends nothing that
// identifies the object's version.

import (
	"context"
	"io"
	"net/http"
)

// A whole is an object that is read by one GET. It implements spool.Whole.
type whole struct {
	*object
	pinned bool // a response has identified the object
}

// Whole sends one GET; see spool.Whole.
func (w *whole) Whole(ctx context.Context) (body io.ReadCloser, length int64, err error) {
	h := http.Header{}
	if w.pinned {
		w.pin(h)
	}
	resp, err := w.getObject(ctx, h)
	if err != nil {
		return nil, 0, err
	}
	if err = plain(resp); resp.StatusCode != http.StatusOK {
		err = w.checkStatus(resp)
	}
	if err == nil && w.pinned {
		err = w.checkSame(resp)
	}
	if err != nil {
		_ = resp.Body.Close()
		return nil, 0, err
	}
	if !w.pinned {
		w.pinned = true
		w.answer = resp.Header
		w.etag, w.modified, w.date = resp.Header.Get("ETag"), resp.Header.Get("Last-Modified"), resp.Header.Get("Date")
	}
	return resp.Body, resp.ContentLength, nil
}
