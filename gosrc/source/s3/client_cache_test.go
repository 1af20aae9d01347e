package s3

import (
	"fmt"
	"testing"

	"github.com/overwire/overwire/gosrc/source"
)

// A full cache drops the least recently acquired client, so that a client in use does not lose what it has
// learned about its store.
func TestFullCacheDropsTheOldestClient(t *testing.T) {
	acquire := func(name string) *client {
		t.Helper()
		c, err := acquireClient(t.Context(), source.Options{Storage: map[string]string{
			"key": name, "secret": "s", "region": "eu-west-1"}})
		if err != nil {
			t.Fatal(err)
		}
		c.releaseClient()
		return c
	}
	used, unused := acquire("used"), acquire("unused")
	for n := range 2 * maxClients {
		acquire(fmt.Sprint("other ", n))
		if acquire("used") != used {
			t.Fatalf("the client in use was dropped after %d others", n+1)
		}
	}
	if acquire("unused") == unused {
		t.Errorf("the cache has more than %d clients", maxClients)
	}
}
