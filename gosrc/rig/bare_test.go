package main

import (
	"context"
	"testing"

	"github.com/overwire/overwire/gosrc/measure"
)

// Each codec has a row for each way, beside its library.
func TestBare(t *testing.T) {
	r := &run{Run: &measure.Run{Ctx: context.Background(), Options: measure.Options{Repeat: 1}}}
	if err := r.bare(); err != nil {
		t.Fatal(err)
	}
	if len(r.Report.Rows) != 10 {
		t.Errorf("%d rows", len(r.Report.Rows))
	}
	for _, row := range r.Report.Rows {
		t.Logf("%-50s %6.3f %s, library %6.3f, share %.3f", row.Name, row.Value, row.Unit, row.Floor, row.Share)
		if row.Value <= 0 || row.Floor <= 0 || row.Share <= 0 {
			t.Errorf("%+v", row)
		}
	}
}
