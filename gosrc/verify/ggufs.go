package verify

// This file describes GGUF files by their headers.

import (
	"context"
	"errors"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/format/gguf"
	"github.com/overwire/overwire/gosrc/source"
	"github.com/overwire/overwire/gosrc/source/open"
	"github.com/overwire/overwire/gosrc/stored"
)

const formatGGUF = "gguf"

// openOrList describes the GGUF files among uris, and opens the others as a model. At first it looks for GGUF only in
// files with the GGUF extension, so most files are opened only once. The model is nil if all files are GGUF.
func openOrList(
	ctx context.Context, uris []string, access format.Access, unlisted bool,
) (*stored.Model, []InspectedFile, error) {
	dial := open.With(access.Options).OpenLike
	isGGUF := func(uri string) bool { return strings.HasSuffix(source.Name(uri), "."+formatGGUF) }
	files, others, err := listGGUFs(ctx, uris, dial, isGGUF)
	if err != nil || len(others) == 0 && len(files) > 0 {
		return nil, files, err
	}
	m, err := stored.OpenNamed(ctx, others, access, unlisted)
	if !errors.Is(err, errs.ErrFormat) {
		return m, files, err
	}
	more, others, fault := listGGUFs(ctx, others, dial, func(uri string) bool { return !isGGUF(uri) })
	switch files = append(files, more...); {
	case fault != nil:
		return nil, nil, fault
	case len(more) == 0:
		return nil, files, err
	case len(others) == 0:
		return nil, files, nil
	}
	m, err = stored.OpenNamed(ctx, others, access, unlisted)
	return m, files, err
}

// listGGUFs describes the GGUF files for which may returns true, and lists the others, including unreadable files.
func listGGUFs(
	ctx context.Context, uris []string, dial format.Opener, may func(uri string) bool,
) (files []InspectedFile, others []string, err error) {
	for _, uri := range uris {
		if may(uri) {
			if file, is, err := inspectGGUF(ctx, uri, dial); is && err != nil {
				return nil, nil, err
			} else if is {
				files = append(files, file)
				continue
			}
		}
		others = append(others, uri)
	}
	return files, others, nil
}

// inspectGGUF describes a GGUF file. is reports whether the file begins like a GGUF file.
func inspectGGUF(ctx context.Context, uri string, dial format.Opener) (file InspectedFile, is bool, err error) {
	src, err := dial(ctx, uri, source.Outline{})
	if err != nil {
		return file, false, err
	}
	defer src.Close()
	head, err := source.Head(ctx, src)
	if err != nil || !gguf.Is(head) {
		return file, false, err
	}
	h, err := gguf.ReadHeader(ctx, src)
	if err == nil {
		err = source.Unwritten(src)
	}
	file = InspectedFile{
		URI: errs.RedactURI(uri), Format: formatGGUF, Size: src.Size(), Header: h.Header, Metadata: h.Metadata,
		Tensors: make([]InspectedTensor, len(h.Tensors)), opened: uri,
	}
	for i, t := range h.Tensors {
		shape := t.Shape
		if shape == nil {
			shape = []int64{}
		}
		size, coding := t.Bytes, "plain"
		if size == gguf.Unsized {
			size, coding = 0, CodingUnknown
		}
		file.Tensors[i] = InspectedTensor{
			Name: t.Name, DType: t.Type, Shape: shape, Bytes: size, Stored: size, Ratio: 1, Coding: coding,
		}
	}
	return file, true, err
}

// IsUnknown reports whether a dtype is an unknown GGUF type. The sizes of such tensors are unknown.
func IsUnknown(dtype string) bool { return strings.HasSuffix(dtype, gguf.NotKnown) }
