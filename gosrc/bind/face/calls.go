package face

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/overwire/overwire/gosrc/cli"
	"github.com/overwire/overwire/gosrc/fault"
	"github.com/overwire/overwire/gosrc/job"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/save"
	"github.com/overwire/overwire/gosrc/source/open"
)

// A verb takes one text and gives one, and may wait in between: for a server, a
// disk, a key derivation. Python calls every one of them in the same way, by
// Begin, Wait and Result, so that each of them obeys Ctrl-C.
type verb struct {
	run func(ctx context.Context, text string) (result, error)
	// lent: it works on memory or a descriptor of the caller's, which are the
	// caller's again only when it has ended.
	lent bool
}

// A result is for one receiver; drop, which may be nil, frees what it stands for
// where there is none.
type result struct {
	text string
	drop func()
}

var verbs = map[string]verb{
	"open":    {run: openModel},
	"names":   {run: textOf(indexNames)},
	"inspect": {run: textOf(inspect)},
	"presign": {run: textOf(presign)},
	"doctor":  {run: textOf(doctor)},
	"records": {run: textOf(tensorsRecords)},
	"write":   {run: textOf(tensorsWrite), lent: true},
	"front":   {run: textOf(tensorsFront)},
	"sums":    {run: textOf(tensorsSums), lent: true},
	"key":     {run: textOf(tensorsKey)},
}

// textOf is a verb whose result is its text alone.
func textOf(run func(context.Context, string) (string, error)) func(context.Context, string) (result, error) {
	return func(ctx context.Context, text string) (result, error) {
		text, err := run(ctx, text)
		return result{text: text}, err
	}
}

// A calling is a verb that runs, or has ended and not been heard.
type calling struct {
	lent   bool
	mu     sync.Mutex
	result result
	gone   bool // the handle is: nobody will take the result
}

// Begin starts a verb and returns its job. The caller ends it by Result or by
// Abandon.
func Begin(name, text string) (uint64, error) {
	v, ok := verbs[name]
	if !ok {
		return 0, fault.New(fault.ErrArgument, "there is no verb %q", name)
	}
	c := &calling{lent: v.lent}
	j := job.Start(name, func(ctx context.Context, _ *job.Job) error {
		r, err := v.run(ctx, text)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.gone && r.drop != nil {
			r.drop()
			return nil
		}
		c.result = r
		return nil
	})
	return jobs.put(&entry{job: j, calling: c}), nil
}

// Result returns what a verb that has ended without an error gave, and forgets it.
func Result(h uint64) (string, error) {
	e, err := jobs.get(h)
	if err != nil {
		return "", err
	}
	if e.calling == nil || !ended(e.job) {
		return "", fault.New(fault.ErrArgument, "job %d is no call that has ended", h)
	}
	if err := e.job.Err(); err != nil {
		return "", err
	}
	if _, mine := jobs.take(h); !mine {
		return "", fault.New(fault.ErrArgument, "job %d was freed", h)
	}
	return e.calling.result.text, nil
}

// abandonWait is how long Abandon waits for the end of a verb that holds nothing of
// the caller's: most of them are over by then, and so leave no trace. One that hangs
// in the system (a file system that does not answer) ends when that lets it.
const abandonWait = 50 * time.Millisecond

// Abandon cancels a verb and forgets it. When it returns, nothing of the caller's is
// in use any more.
func Abandon(h uint64) {
	e, ok := jobs.take(h)
	if !ok || e.calling == nil {
		return
	}
	e.job.Cancel()
	wait := abandonWait
	if e.calling.lent {
		wait = -1
	}
	_, _ = e.job.Wait(wait)
	e.calling.drop()
}

func (c *calling) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	if c.result.drop != nil {
		c.result.drop()
	}
	c.result = result{}
}

// openModel opens what the JSON of a load.Spec names; the text is its handle.
func openModel(ctx context.Context, spec string) (result, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return result{}, err
	}
	m, err := load.Open(ctx, s)
	if err != nil {
		return result{}, err
	}
	h := models.put(m)
	return result{strconv.FormatUint(h, 10), func() { CloseModel(h) }}, nil
}

// indexNames gives the tensors that the index.json files of a load.Spec
// promise, as a JSON list, or null when some of its files have no index.
func indexNames(ctx context.Context, spec string) (string, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return "", err
	}
	names, ok, err := load.Names(ctx, s)
	if err != nil {
		return "", err
	}
	if !ok {
		return "null", nil
	}
	return encode(names)
}

// inspect describes the files of the JSON of a load.Spec by their headers
// alone, as JSON.
func inspect(ctx context.Context, spec string) (string, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return "", err
	}
	r, err := save.Inspect(ctx, s.URIs, s.Storage)
	if err != nil {
		return "", err
	}
	return encode(r)
}

// presign makes a URL that reads the one s3:// object of the JSON of a load.Spec
// without credentials for so many "seconds". It is a secret.
func presign(ctx context.Context, spec string) (string, error) {
	s, err := parse[load.Spec]("spec", spec)
	if err != nil {
		return "", err
	}
	life, err := parse[struct {
		Seconds int `json:"seconds"`
	}]("spec", spec)
	if err != nil {
		return "", err
	}
	if len(s.URIs) != 1 {
		return "", fault.New(fault.ErrArgument, "%d URIs", len(s.URIs))
	}
	return open.Presign(ctx, s.URIs[0], s.Storage.Options, time.Duration(life.Seconds)*time.Second)
}

// doctor describes the machine as JSON; the argument --measure measures the
// wires of its GPUs too.
func doctor(_ context.Context, text string) (string, error) {
	p, err := parse[program]("program", text)
	if err != nil {
		return "", err
	}
	return encode(cli.Diagnose(p.env(), slices.Contains(p.Argv, "--measure")))
}
