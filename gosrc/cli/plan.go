package cli

// This file predicts what a load or an offload would need, for load --plan and doctor.

import (
	"fmt"
	"io"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/load"
	"github.com/overwire/overwire/gosrc/plan"
)

// planReport is the JSON document that load --plan prints.
type planReport struct {
	Tensors int           `json:"tensors"`
	Bytes   int64         `json:"bytes"`   // size of all tensors after the load
	Stored  int64         `json:"stored"`  // bytes to read or map
	Peak    int64         `json:"peak"`    // maximum tensor memory during the load
	Staging int64         `json:"staging"` // memory for slots on the device
	Pinned  int64         `json:"pinned"`  // host memory for a GPU's slots
	Tiers   []plan.Tier   `json:"tiers"`
	Offload *plan.Offload `json:"offload,omitempty"`
}

// planLoad runs load --plan.
func planLoad(c *call) error {
	q := load.Prospect{Device: c.opts["device"]}
	if q.Device != "" {
		if _, err := device.Number(q.Device); err != nil {
			return err
		}
	}
	keep := c.size("keep")
	q.Keep = &keep
	m, err := openModel(c, c.args, c.storage)
	if err != nil {
		return err
	}
	defer m.Close()
	estimate, err := load.EstimateMemory(m, nil, q)
	if err != nil {
		return err
	}
	r := planReport{
		Tensors: len(estimate.Bytes), Peak: estimate.Peak, Staging: estimate.Staging, Pinned: estimate.Pinned,
		Tiers: estimate.Tiers,
	}
	if _, there := c.opts["keep"]; there {
		r.Offload = estimate.Offload
	}
	for i, n := range estimate.Bytes {
		r.Bytes += n
		r.Stored += m.Index().Tensors[i].Stored
	}
	return c.show(r, func(w io.Writer) {
		fmt.Fprintf(w, "%s, %s, read or mapped as %s\n", countText(r.Tensors, "tensor"), bytesText(r.Bytes),
			bytesText(r.Stored))
		fmt.Fprintf(w, "load: %s at peak, slots of %s\n", bytesText(r.Peak), bytesText(r.Staging))
		if r.Offload != nil {
			fmt.Fprintf(w, "offload: %s\n", offloadText(r.Offload))
		}
		for _, t := range r.Tiers {
			fmt.Fprintf(w, "weights %s: %s\n", tierNames[t.Where], tierText(t))
		}
	})
}

// tierNames maps the names of tiers to their descriptions.
var tierNames = map[string]string{"resident": "resident", "device": "compressed on the device",
	"host": "compressed on the host"}

// tierText describes the memory and the cost of a tier.
func tierText(t plan.Tier) string {
	text := bytesText(t.Device) + " on the device"
	if t.Host > 0 {
		text += ", " + bytesText(t.Host) + " on the host"
	}
	text += "; " + t.Cost
	if t.Group != "" {
		text += "; " + t.Group
	}
	return text
}

// offloadText describes an offload's memory on the device and the host, in two lines.
func offloadText(o *plan.Offload) string {
	if len(o.Blocks) == 0 {
		return fmt.Sprintf("nothing is streamed: %s on the device", bytesText(o.DeviceBytes()))
	}
	return fmt.Sprintf("%s on the device (%s outside blocks, %s of kept blocks, a ring of %s)\n"+
		"streamed: %s (%s), from %s to %s, with at most %s of host memory",
		bytesText(o.DeviceBytes()), bytesText(o.Rest), bytesText(o.Kept), bytesText(o.Ring),
		countText(len(o.Blocks), "block"), bytesText(o.Streamed), o.Blocks[0], o.Blocks[len(o.Blocks)-1],
		bytesText(o.Stored))
}

// A Model is doctor's report on a model: whether its weights fit on each GPU.
type Model struct {
	Path  string     `json:"path"`
	Bytes int64      `json:"bytes"`
	GPUs  []ModelFit `json:"gpus"`
}

// A ModelFit describes how a model would run on one GPU.
type ModelFit struct {
	Index int `json:"index"`
	// Fits means that the weights leave a fifth of the GPU for activations.
	Fits bool `json:"fits"`
	// Where names the fastest tier that leaves a fifth of the GPU free. It is "resident" or a value for the argument
	// `where` of overwire.offload. "" means that the model cannot run.
	Where string `json:"where"`
	// Keep and Room are arguments of overwire.offload that use the free memory, except for that fifth.
	Keep int64 `json:"keep"`
	Room int64 `json:"room"`
	// Tiers are the kinds of memory that the weights can be in. Offload describes an offload of all blocks. It is nil
	// if the weights fit or the model cannot run.
	Tiers   []plan.Tier   `json:"tiers"`
	Offload *plan.Offload `json:"offload,omitempty"`
}

// diagnoseModel reports how the model that the arguments name would run on each GPU.
func diagnoseModel(c *call, devices []GPUDevice) (*Model, error) {
	m, err := openModel(c, c.args, c.storage)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	keep := int64(0)
	all, err := load.EstimateMemory(m, nil, load.Prospect{Keep: &keep})
	if err != nil {
		return nil, err
	}
	r := &Model{Path: errs.RedactURI(c.args[0]), Bytes: all.Peak, GPUs: []ModelFit{}}
	for _, d := range devices {
		fit, room := ModelFit{Index: d.Index, Tiers: all.Tiers}, d.Memory/5*4
		for _, t := range all.Tiers {
			if t.Device > room {
				continue
			}
			switch fit.Where = t.Where; t.Where {
			case "resident":
				fit.Fits = true
			case "device":
				fit.Keep, fit.Offload = room-t.Device, all.Offload // kept blocks never need larger slots
			case "host":
				fit.Where, fit.Room, fit.Offload = "auto", room-t.Device, all.Offload
			}
			break
		}
		r.GPUs = append(r.GPUs, fit)
	}
	return r, nil
}

func (m *Model) writeLines(available int64, line func(name, format string, args ...any)) {
	line("model", "%s, %s", m.Path, bytesText(m.Bytes))
	if len(m.GPUs) == 0 {
		fits := "fits"
		if m.Bytes > available {
			fits = "does not fit"
		}
		line("model on the host", "%s in the available memory", fits)
	}
	for _, fit := range m.GPUs {
		line(fmt.Sprintf("model on cuda:%d", fit.Index), "%s", fit.describeFit())
	}
	if n := int64(len(m.GPUs)); n > 1 && m.GPUs[0].Where == "auto" {
		host := m.GPUs[0].Tiers[2].Host
		line("model on all GPUs", "overwire.offload(model, group=): at most %s on the host for each of %d ranks, "+
			"together %s instead of %s", bytesText((host+n-1)/n), n, bytesText(host), bytesText(n*host))
	}
}

func (fit *ModelFit) describeFit() string {
	options := ""
	switch fit.Where {
	case "resident":
		return "fits"
	case "device":
		options = fmt.Sprintf(`where="device", keep=%d`, fit.Keep)
	case "auto":
		options = fmt.Sprintf(`where="auto", room=%d`, fit.Room)
	default:
		return "does not fit, and overwire.offload cannot run it here either: its smallest ring does not fit"
	}
	text := fmt.Sprintf(`does not fit: overwire.offload(model, "cuda:%d", %s)`, fit.Index, options)
	for _, t := range fit.Tiers[1:] {
		text += fmt.Sprintf("; weights %s: %s", tierNames[t.Where], tierText(t))
	}
	return text
}
