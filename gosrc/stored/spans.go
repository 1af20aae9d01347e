package stored

// This file reads whole tensors, span by span.

import (
	"context"
	"slices"

	"github.com/overwire/overwire/gosrc/internal/ordered"
)

// A Span is a range of a tensor's bytes in row-major order.
type Span struct {
	Reader *Tensor
	Number int // tensor number, for the caller
	Off, N int64
	Last   bool
}

// AppendSpans appends the spans of a tensor with the given number of bytes. Reading them decodes no chunk twice.
func AppendSpans(spans []Span, r *Tensor, number int, bytes int64) []Span {
	step := r.Step()
	for off := int64(0); off < bytes; off += step {
		n := min(step, bytes-off)
		spans = append(spans, Span{r, number, off, n, off+n == bytes})
	}
	return spans
}

// Read reads the span into *buf, which grows as needed.
func (s *Span) Read(ctx context.Context, buf *[]byte) ([]byte, error) {
	*buf = slices.Grow((*buf)[:0], int(s.N))[:s.N]
	return *buf, s.Reader.Fill(ctx, *buf, s.Off)
}

// Window returns how many spans ReadInOrder keeps in memory for some workers.
func Window(workers int) int { return 3*workers + 2 }

// ReadInOrder reads spans with several workers. It calls work in parallel with a span's number and bytes. Then it calls
// turn for the spans in order, one at a time. The bytes are valid until turn returns. work may be nil.
func ReadInOrder(ctx context.Context, name string, workers int, spans []Span, work func(k int, b []byte),
	turn func(k int, b []byte) error) error {
	bufs := make([][]byte, Window(workers))
	o := ordered.Tasks{N: len(spans), Window: len(bufs), Workers: workers,
		Work: func(_, k int) error {
			b, err := spans[k].Read(ctx, &bufs[k%len(bufs)])
			if err == nil && work != nil {
				work(k, b)
			}
			return err
		},
		Turn: func(k int) error { return turn(k, bufs[k%len(bufs)]) },
	}
	return o.Run(ctx, name)
}
