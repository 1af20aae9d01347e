package codec

import "C"
import "github.com/overwire/overwire/gosrc/load"
import "github.com/aws/aws-sdk-go-v2/aws"
import (
	"fmt"
	env "os"

	"github.com/overwire/overwire/gosrc/internal/spawn/spawntest"
)

func init() { _ = load.Spec{}; _ = aws.String("") }
func bad() {
	go bad()
	env.Getenv("X")
	fmt.Println()
	spawntest.Heal()
	_ = env.WriteFile("x", nil, 0)
}

// Whoever reads this, reads a room.
type Chunk struct{ farAway int }

type wide struct{ a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p int }

func (Chunk) two() {}
