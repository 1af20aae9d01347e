package cli

// This file defines the host command, which keeps models in memory for all processes of a user.

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/format"
	"github.com/overwire/overwire/gosrc/hoststore"
	"github.com/overwire/overwire/gosrc/internal/hostmem"
	"github.com/overwire/overwire/gosrc/knob"
	"github.com/overwire/overwire/gosrc/source/open"
)

var hostVerb = &verb{
	name: "host", args: "[list | put SRC... | drop NAME | budget [SIZE]]", least: 0, most: -1,
	words: [][]string{{"list", "put", "drop", "budget"}},
	short: "keep models in memory, one copy for all processes",
	long: `
Without an argument, runs the host store until it is interrupted. It keeps the bytes of
model files in memory, one copy for all processes of this user on this machine. Processes
use it with load_file(..., host=True), or if OVERWIRE_HOST is auto. The first load of a
file puts it into the store, and later loads read it from there. If the store ends, loads
read the files, and running programs are not affected. If the memory or the budget is
full, the least recently used entries that no process uses are removed.

  list           shows what is in memory
  put SRC...     puts files or folders into memory now
  drop NAME      removes an entry; the first digits of its name are enough
  budget [SIZE]  shows or changes the memory limit of the store`,
	example: "overwire host --budget 200GB &\noverwire host put models/llama\noverwire host list",
	options: []option{
		{name: "budget", value: "SIZE", size: true,
			doc: "memory limit for models (default: half of the memory that is available at the start)"},
		{name: "socket", value: "PATH",
			doc: "socket of the store (default: OVERWIRE_HOST, or host.sock in $XDG_RUNTIME_DIR/overwire, " +
				"or else in overwire-UID in /tmp)"},
		storageOption,
	},
	run: func(c *call) error {
		socket := c.opts["socket"]
		if socket == "" && knob.Host.Get() != "off" {
			socket = knob.Host.Get()
		}
		if len(c.args) == 0 {
			return runHost(c, socket)
		}
		if c.opts["budget"] != "" {
			return usage("host %s: --budget is for starting a store; write overwire host budget SIZE", c.args[0])
		}
		run := map[string]func(*call, context.Context, *hoststore.Client) error{
			"list": listHost, "put": putHost, "drop": dropHost, "budget": setHostBudget}[c.args[0]]
		most := map[string]int{"list": 1, "drop": 2, "budget": 2, "put": len(c.args)}[c.args[0]]
		if run == nil || len(c.args) > most || len(c.args) < 2 && slices.Contains([]string{"put", "drop"}, c.args[0]) {
			return usage("host: write overwire host %s", c.verb.args)
		}
		client, err := hoststore.Dial(c.ctx, socket)
		if err != nil {
			return err
		}
		defer client.Close()
		return run(c, c.ctx, client)
	},
}

// runHost runs a store until the command is interrupted.
func runHost(c *call, socket string) error {
	budget := c.size("budget")
	if budget == 0 {
		budget = hostmem.Available() / 2
	}
	s, err := hoststore.Listen(hoststore.Options{Socket: socket, Budget: budget, Log: func(text string) {
		fmt.Fprintf(c.stderr, "overwire host: %s\n", text)
	}})
	if err != nil {
		return err
	}
	err = c.show(map[string]any{"socket": s.Path(), "budget": budget}, func(w io.Writer) {
		fmt.Fprintf(w, "%s, budget %s\n", s.Path(), bytesText(budget))
	})
	if err != nil {
		s.Close()
		return err
	}
	s.Wait(c.ctx)
	return nil
}

func listHost(c *call, ctx context.Context, client *hoststore.Client) error {
	r, err := client.Budget(ctx, 0)
	if err != nil {
		return err
	}
	return c.show(r, func(w io.Writer) {
		t := table(w)
		for _, e := range r.Entries {
			fmt.Fprintf(t, "%.12s\t%s\t%s\t%s\t%s\t%s\n", e.Name, bytesText(e.Size), e.State,
				countText(e.Users, "user"), e.Used.Local().Format(time.DateTime), safe(e.Label))
		}
		_ = t.Flush()
		fmt.Fprintf(w, "%s: %s of %s used, %s available\n", safe(r.Socket), bytesText(r.Used), bytesText(r.Budget),
			bytesText(r.Available))
	})
}

// putHost puts files into the store.
func putHost(c *call, ctx context.Context, client *hoststore.Client) error {
	stores := open.With(c.storage.Options)
	_, files, _, err := format.OpenAll(ctx, c.args[1:], stores.OpenLike, format.Options{List: stores.List})
	if err != nil {
		return err
	}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, f := range files {
		c.job.TotalBytes.Add(f.Size())
	}
	states := map[string]string{}
	for _, f := range files {
		state, err := client.Put(ctx, f, func(n int64) { c.job.Bytes.Add(n) })
		if err == nil && state == "unnamed" {
			err = errs.New(errs.ErrNotSupported, "expected a compressed file, or a plain safetensors file that is "+
				"on a disk (not in /dev/shm) and has not changed for three seconds")
		}
		if err != nil {
			return errs.In("host", f.URI(), err)
		}
		states[f.URI()] = state
	}
	return c.show(states, func(w io.Writer) {
		for _, f := range files {
			fmt.Fprintf(w, "%s: %s\n", place(f.URI()), states[f.URI()])
		}
	})
}

// dropHost removes the entry with a name, or with a unique beginning of its name.
func dropHost(c *call, ctx context.Context, client *hoststore.Client) error {
	r, err := client.Budget(ctx, 0)
	if err != nil {
		return err
	}
	var names []string
	for _, e := range r.Entries {
		if strings.HasPrefix(e.Name, c.args[1]) && e.State != "dropped" {
			names = append(names, e.Name)
		}
	}
	if len(names) != 1 {
		return errs.New(errs.ErrNotFound, "%d entries match the name %s; see overwire host list", len(names),
			safe(c.args[1]))
	}
	n, err := client.Drop(ctx, names[0])
	if err != nil {
		return err
	}
	return c.show(map[string]any{"name": names[0], "size": n}, func(w io.Writer) {
		fmt.Fprintf(w, "%.12s: %s dropped\n", names[0], bytesText(max(0, n)))
	})
}

// setHostBudget shows or changes the budget.
func setHostBudget(c *call, ctx context.Context, client *hoststore.Client) error {
	n := uint64(0)
	if len(c.args) > 1 {
		o := option{name: "budget", value: "SIZE", size: true}
		if err := o.check(c.args[1]); err != nil {
			return err
		}
		n, _ = humanize.ParseBytes(c.args[1]) // check has parsed it
	}
	r, err := client.Budget(ctx, int64(n))
	if err != nil {
		return err
	}
	return c.show(map[string]any{"budget": r.Budget, "used": r.Used}, func(w io.Writer) {
		fmt.Fprintf(w, "%s of %s used\n", bytesText(r.Used), bytesText(r.Budget))
	})
}
