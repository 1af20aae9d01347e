//go:build owfake

package gather_test

// This file tests a group of one rank on the fake driver. tests/gpu/test_gpu_gather.py tests several ranks.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/overwire/overwire/gosrc/device"
	"github.com/overwire/overwire/gosrc/device/cuda"
	"github.com/overwire/overwire/gosrc/device/cuda/cudatest"
	"github.com/overwire/overwire/gosrc/device/cuda/stream"
	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/gather"
	"github.com/overwire/overwire/gosrc/peers"
)

const blockBytes = 10_000

// gatherBlocks fetches blocks through two buffers and compares their bytes.
func gatherBlocks(ctx context.Context, whole bool) (err error) {
	gpu, err := cuda.Open(0)
	if err != nil {
		return err
	}
	on, err := gpu.NewStream()
	if err != nil {
		return err
	}
	defer gpu.SyncAndFreeStream(on)
	g, err := gather.New(gpu, 3*blockBytes, 0, 1)
	if err != nil {
		return err
	}
	defer g.Close()
	at, err := g.JoinStore(ctx, []peers.Offer{g.OfferStore()})
	if err != nil {
		return err
	}
	store := unsafe.Slice((*byte)(device.Pointer(at)), 3*blockBytes)
	for i := range store {
		store[i] = byte(i / 7)
	}
	offer, err := g.OpenRing(2, blockBytes)
	if err == nil {
		err = g.JoinRing(ctx, []peers.Offer{offer})
	}
	if err != nil {
		return err
	}
	for n := range 6 {
		block := n % 3
		met, err := g.MeetRanks(ctx, uint32(block))
		if err != nil || len(met) != 1 || met[0] != uint32(block) {
			return fmt.Errorf("met at %v: %w", met, err)
		}
		parts := gather.BlockParts{At: int64(block) * blockBytes, Bytes: blockBytes - int64(n), Part: blockBytes,
			Whole: whole}
		if ok, err := g.CopyPart(ctx, parts, on); !ok {
			return fmt.Errorf("copied nothing: %w", err)
		}
		buffer, err := g.TakeBlock(ctx, on)
		if err != nil {
			return err
		}
		got := make([]byte, parts.Bytes)
		to := uint64(uintptr(unsafe.Pointer(&got[0])))
		if err := gpu.Copy(stream.Order{Stream: on}, to, uint64(buffer), parts.Bytes, true); err != nil {
			return err
		}
		if !bytes.Equal(got, store[parts.At:][:parts.Bytes]) {
			return fmt.Errorf("block %d has wrong bytes", block)
		}
	}
	return nil
}

// Blocks arrive unchanged. If any driver call fails, the error is typed and nothing leaks.
func TestBlocksArrive(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, whole := range []bool{false, true} {
		failures := 0
		for nth := int64(0); ; nth++ { // 0 fails no call
			end := cuda.Fake(64 << 20)
			cudatest.FailCall(nth, 999, false)
			err := gatherBlocks(ctx, whole)
			calls := cudatest.CountCalls()
			cudatest.FailCall(0, 0, false)
			if left := end(); left != "" {
				t.Fatalf("call %d fails: %v; leaked: %s", nth, err, left)
			}
			if err != nil {
				failures++
				if nth == 0 || !errors.Is(err, errs.ErrDevice) && !errors.Is(err, errs.ErrNotSupported) {
					t.Fatalf("call %d fails: %v", nth, err)
				}
			} else if nth > calls {
				break
			}
		}
		if failures < 20 {
			t.Errorf("only %d calls failed", failures)
		}
	}
}

// Blocks that are outside the store or larger than a buffer are refused, and so are calls in the wrong order.
func TestWrongCallsAreRefused(t *testing.T) {
	end := cuda.Fake(64 << 20)
	gpu, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	g, err := gather.New(gpu, 2*blockBytes, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, errs.ErrArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = g.MeetRanks(t.Context(), 1)
	refused("not connected", err)
	good := gather.BlockParts{Bytes: blockBytes, Part: blockBytes, Whole: true}
	_, err = g.CopyPart(t.Context(), good, 0)
	refused("no ring", err)
	if _, err = g.OpenRing(1, blockBytes); err != nil {
		t.Fatal(err)
	}
	_, err = g.OpenRing(1, blockBytes)
	refused("two rings", err)
	_, err = g.CopyPart(t.Context(), good, 0)
	refused("not connected", err)
	if _, err = g.JoinStore(t.Context(), []peers.Offer{g.OfferStore()}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []gather.BlockParts{
		{At: -1, Bytes: 1, Part: 1, Whole: true},
		{At: blockBytes + 1, Bytes: blockBytes, Part: blockBytes, Whole: true},
		{Bytes: blockBytes + 1, Part: blockBytes + 1, Whole: true}, {Bytes: 2, Part: 1, Whole: true},
		{Bytes: -1, Part: 1, Whole: true}, {Bytes: 1, Part: 1},
	} {
		_, err = g.CopyPart(t.Context(), p, 0)
		refused(fmt.Sprintf("%+v", p), err)
	}
	_, err = g.TakeBlock(t.Context(), 0)
	refused("nothing to take", err)
	if ok, err := g.CopyPart(t.Context(), good, 0); !ok || err != nil {
		t.Error(ok, err)
	}
	_, err = g.CopyPart(t.Context(), good, 0)
	refused("no free buffer", err)
	g.Close()
	if left := end(); left != "" {
		t.Error(left)
	}
}
