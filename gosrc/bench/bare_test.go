package bench

import (
	"context"
	"testing"
)

// Each codec has a row for each way, beside its library.
func TestBare(t *testing.T) {
	r := &run{ctx: context.Background(), opt: Options{Repeat: 1}}
	if err := r.bare(); err != nil {
		t.Fatal(err)
	}
	if len(r.report.Rows) != 10 {
		t.Errorf("%d rows", len(r.report.Rows))
	}
	for _, row := range r.report.Rows {
		t.Logf("%-50s %6.3f %s, library %6.3f, share %.3f", row.Name, row.Value, row.Unit, row.Floor, row.Share)
		if row.Value <= 0 || row.Floor <= 0 || row.Share <= 0 {
			t.Errorf("%+v", row)
		}
	}
}
