package sourcetest

import (
	"testing"

	"github.com/overwire/overwire/gosrc/source"
)

// The test sources pass the suite, including one that only permits ReadAt.
func TestSuite(t *testing.T) {
	mem := func(_ *testing.T, data []byte) source.Source { return &closing{Mem: Mem{Name: "mem", Data: data}} }
	t.Run("memory", func(t *testing.T) { Suite(t, Is{}, mem) })
	t.Run("decorated", func(t *testing.T) {
		Suite(t, Is{}, func(t *testing.T, data []byte) source.Source { return &Faulty{Source: mem(t, data)} })
	})
}

// closing is a Mem that cannot be read after Close.
type closing struct {
	Mem
}

func (c *closing) Close() error {
	c.Data = nil
	return nil
}
