// Command versitygw is the tests' S3 server: versitygw's gateway over a folder. It takes the flags of the released
// program that the tests use, and leaves out the parts that take a third of its compile time: other storage, its own
// tests, its administration.
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	c := embedgw.Config{
		RootUserAccess: os.Getenv("ROOT_ACCESS_KEY"),
		RootUserSecret: os.Getenv("ROOT_SECRET_KEY"),
		Ports:          []string{""},
		// Defaults of the released program.
		MaxConnections:    250_000,
		MaxRequests:       100_000,
		MultipartMaxParts: 10_000,
		IAMCacheTTL:       120,
		IAMCachePrune:     3600, // with 0 it prunes without a pause and keeps one core busy
	}
	flag.StringVar(&c.Ports[0], "port", "", "`ADDRESS` to listen at")
	flag.StringVar(&c.CertFile, "cert", "", "`FILE` with the certificate, for TLS")
	flag.StringVar(&c.KeyFile, "key", "", "`FILE` with its key")
	flag.StringVar(&c.HealthPath, "health", "", "`PATH` that answers without credentials")
	flag.StringVar(&c.IAMDir, "iam-dir", "", "`FOLDER` of accounts")
	flag.BoolVar(&c.KeepAlive, "keep-alive", false, "keep connections")
	flag.BoolVar(&c.Quiet, "quiet", false, "log no requests")
	flag.Parse()
	if flag.NArg() != 2 || flag.Arg(0) != "posix" {
		log.Fatal("usage: versitygw [FLAGS] posix FOLDER")
	}
	backend, err := posix.New(flag.Arg(1), meta.XattrMeta{}, posix.PosixOpts{
		Concurrency:         5000,
		CopyObjectThreshold: 5 << 30,
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := embedgw.RunVersityGW(ctx, backend, &c); err != nil {
		log.Fatal(err)
	}
}
