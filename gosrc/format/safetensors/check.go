package safetensors

// This file checks the tensors of a header against the rules of the format.

import (
	"cmp"
	"slices"
	"strings"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/tensor"
)

// checkTensors checks the parsed tensors against the rules of the format, in the same order as the safetensors
// library, and sets their final order and offsets.
func (h *Header) checkTensors(uri string, size int64, opt Options) error {
	if err := h.checkUnique(uri, opt); err != nil {
		return err
	}
	h.takeNotice()
	order := func(a, b *tensor.Tensor) int {
		if a.Off != b.Off {
			return cmp.Compare(a.Off, b.Off)
		}
		if a.Stored != b.Stored {
			return cmp.Compare(a.Stored, b.Stored)
		}
		return strings.Compare(a.Name, b.Name)
	}
	ts := h.Tensors
	for i := 1; i < len(ts); i++ {
		if order(&ts[i-1], &ts[i]) > 0 { // most writers sort, so this is rare
			sorted := make([]*tensor.Tensor, len(ts))
			for k := range ts {
				sorted[k] = &ts[k]
			}
			slices.SortFunc(sorted, order)
			ts = make([]tensor.Tensor, len(sorted))
			for k, t := range sorted {
				ts[k] = *t
			}
			h.Tensors = ts
			break
		}
	}
	end := int64(0)
	for i := range ts {
		t := &ts[i] // so far, Off is the header's begin and Stored its end - begin
		at := h.Data + t.Off
		if t.Off != end || t.Stored < 0 {
			return locateError(uri, t.Name, at, errs.OfRule("InvalidOffset", errs.ErrFormat,
				"its bytes are [%d, %d) of the data section, expected to begin at %d", t.Off, t.Off+t.Stored,
				end))
		}
		end += t.Stored
		bytes, err := tensor.Size(t.DType, t.Shape)
		if err != nil {
			return locateError(uri, t.Name, at, err)
		}
		if bytes != t.Stored {
			return locateError(uri, t.Name, at, errs.OfRule("TensorInvalidInfo", errs.ErrFormat,
				"it has %d bytes, but shape %v of %v takes %d", t.Stored, t.Shape, t.DType, bytes))
		}
		t.Off, t.Bytes = at, bytes
	}
	have := size - h.Data // not negative, because Length checked it
	if end > have {
		return locateError(uri, "", size, errs.OfRule("MetadataIncompleteBuffer", errs.ErrCorrupt,
			"truncated: the file has %d of %d bytes; copy or fetch it again", size,
			uint64(h.Data)+uint64(end)))
	}
	if end < have && !opt.Lenient {
		return locateError(uri, "", h.Data+end, errs.OfRule("MetadataIncompleteBuffer", errs.ErrFormat,
			"the file has %d bytes after the last tensor", have-end))
	}
	return nil
}

// takeNotice removes the notice from the tensors of a container. A second notice stays there and is refused.
func (h *Header) takeNotice() {
	_, isMarked := h.Metadata[ContainerKey]
	endsThere := func(t tensor.Tensor) bool { return t.Off == 0 && t.Stored == noticeAt } // only in plain files
	if !isMarked || slices.ContainsFunc(h.Tensors, endsThere) {
		return
	}
	for i := range h.Tensors {
		t := &h.Tensors[i]
		if t.Off == noticeAt && t.Stored == 0 && t.DType == tensor.U8 && slices.Equal(t.Shape, []int64{0}) {
			h.Notice = t.Name
			h.Tensors = slices.Delete(h.Tensors, i, i+1)
			return
		}
	}
}

// checkUnique refuses two tensors with the same name. In lenient mode it keeps the last one.
func (h *Header) checkUnique(uri string, opt Options) error {
	i := tensor.Duplicate(h.Tensors)
	if i < 0 {
		return nil
	}
	if !opt.Lenient {
		return locateError(uri, h.Tensors[i].Name, -1, errs.OfRule("InvalidHeaderDeserialization", errs.ErrFormat,
			"two tensors have this name"))
	}
	last := make(map[string]int, len(h.Tensors))
	for i := range h.Tensors {
		last[h.Tensors[i].Name] = i
	}
	tensors := h.Tensors[:0]
	for i, t := range h.Tensors {
		if last[t.Name] == i {
			tensors = append(tensors, t)
		}
	}
	h.Tensors = tensors
	return nil
}
