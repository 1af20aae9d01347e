// Package rawjson reads and writes JSON with strings of arbitrary bytes. JSON strings consist of characters,
// but file names consist of bytes. A byte that is not part of a character is written as an escape \udc80 ...
// \udcff, as in Python's os.fsdecode, so that different names remain different.
package rawjson

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// mark precedes two hex digits that represent such a byte, or NUL, while encoding/json processes a string.
const mark = "\x00"

// markJSON is the JSON escape of mark.
const markJSON = `\u0000`

// Marshal is json.Marshal, but it preserves bytes that are not UTF-8, and does not escape <, > and &.
func Marshal(v any) ([]byte, error) {
	b, err := marshalPlain(v)
	// encoding/json writes the character U+FFFD unchanged, and invalid bytes as its escape.
	if err != nil || !bytes.Contains(b, []byte(`\ufffd`)) {
		return b, err
	}
	marked, err := marshalPlain(mapTexts(reflect.ValueOf(v), toMarks).Interface())
	if err != nil {
		return nil, err
	}
	return []byte(rewriteEscapes(string(marked), func(out *strings.Builder, escape, rest string) int {
		if escape != markJSON {
			out.WriteString(escape)
			return 0
		}
		digits := rest[:2] // toMarks wrote them
		if digits == "00" {
			out.WriteString(markJSON)
		} else {
			out.WriteString(`\udc` + digits)
		}
		return 2
	})), nil
}

func marshalPlain(v any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}

// Unmarshal is json.Unmarshal, but it converts the escapes \udc80 ... \udcff to bytes, and preserves bytes that
// are not UTF-8. It refuses other lone surrogates. It also refuses unknown keys of structs, because a
// misspelled key would otherwise be ignored.
func Unmarshal(text string, v any) error {
	if utf8.ValidString(text) && !strings.Contains(text, `\ud`) && !strings.Contains(text, `\uD`) {
		return unmarshalKnown(text, v)
	}
	var lone error
	result := rewriteEscapes(text, func(out *strings.Builder, escape, rest string) int {
		r := runeOf(escape)
		switch {
		case r == 0:
			out.WriteString(markJSON + "00")
		case 0xD800 <= r && r < 0xDC00 && runeOf(rest) >= 0xDC00 && runeOf(rest) < 0xE000:
			out.WriteString(escape + rest[:6]) // a pair: one character
			return 6
		case 0xDC80 <= r && r < 0xDD00:
			fmt.Fprintf(out, markJSON+"%02x", r&0xFF)
		case 0xD800 <= r && r < 0xE000:
			lone = fmt.Errorf("%s is a lone surrogate", escape)
		default:
			out.WriteString(escape)
		}
		return 0
	})
	if result = strings.ReplaceAll(toMarks(result), mark, markJSON); lone != nil {
		return lone
	}
	if err := unmarshalKnown(result, v); err != nil {
		return err
	}
	to := reflect.ValueOf(v).Elem()
	to.Set(mapTexts(to, fromMarks))
	return nil
}

// unmarshalKnown is json.Unmarshal, but refuses keys that v does not have.
func unmarshalKnown(text string, v any) error {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("the text has more than one value")
	}
	return nil
}

// rewriteEscapes copies a JSON text and calls each to replace every \uXXXX. each returns how many bytes of rest
// it has consumed.
func rewriteEscapes(text string, each func(out *strings.Builder, escape, rest string) int) string {
	var out strings.Builder
	for i := 0; i < len(text); {
		n := strings.IndexByte(text[i:], '\\')
		if n < 0 || i+n+2 > len(text) {
			out.WriteString(text[i:])
			break
		}
		out.WriteString(text[i : i+n])
		i += n
		if text[i+1] != 'u' || runeOf(text[i:]) < 0 {
			out.WriteString(text[i : i+2])
			i += 2
			continue
		}
		count := each(&out, text[i:i+6], text[i+6:])
		i += 6 + count
	}
	return out.String()
}

// runeOf returns the number in the escape \uXXXX at the beginning of a text, or -1.
func runeOf(text string) rune {
	if len(text) < 6 || text[:2] != `\u` {
		return -1
	}
	n, err := strconv.ParseUint(text[2:6], 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

// toMarks replaces bytes that are not part of a character, and NUL, with marks.
func toMarks(text string) string {
	if utf8.ValidString(text) && !strings.Contains(text, mark) {
		return text
	}
	var out strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRuneInString(text)
		if r == 0 || r == utf8.RuneError && n == 1 {
			fmt.Fprintf(&out, mark+"%02x", text[0])
		} else {
			out.WriteString(text[:n])
		}
		text = text[n:]
	}
	return out.String()
}

// fromMarks reverses toMarks.
func fromMarks(text string) string {
	before, rest, hasMark := strings.Cut(text, mark)
	if !hasMark {
		return text
	}
	out := []byte(before)
	for hasMark {
		b, err := hex.DecodeString(rest[:min(2, len(rest))])
		if err != nil || len(b) != 1 {
			return text // not a mark: Unmarshal marks every NUL
		}
		before, rest, hasMark = strings.Cut(rest[2:], mark)
		out = append(append(out, b...), before...)
	}
	return string(out)
}

// mapTexts returns a copy of v with fn applied to every string that is written to JSON.
func mapTexts(v reflect.Value, fn func(string) string) reflect.Value {
	if !v.IsValid() {
		return reflect.Zero(reflect.TypeFor[any]())
	}
	out := reflect.New(v.Type()).Elem()
	out.Set(v)
	switch v.Kind() {
	case reflect.String:
		out.SetString(fn(v.String()))
	case reflect.Pointer:
		if !v.IsNil() {
			out.Set(reflect.New(v.Type().Elem()))
			out.Elem().Set(mapTexts(v.Elem(), fn))
		}
	case reflect.Interface:
		if !v.IsNil() {
			out.Set(mapTexts(v.Elem(), fn))
		}
	case reflect.Slice:
		if !v.IsNil() && mayHoldTexts(v.Type().Elem()) {
			out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
			for i := range v.Len() {
				out.Index(i).Set(mapTexts(v.Index(i), fn))
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			out.Index(i).Set(mapTexts(v.Index(i), fn))
		}
	case reflect.Map:
		if !v.IsNil() {
			out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
			for key, value := range v.Seq2() {
				out.SetMapIndex(mapTexts(key, fn), mapTexts(value, fn))
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				out.Field(i).Set(mapTexts(v.Field(i), fn))
			}
		}
	}
	return out
}

// mayHoldTexts reports whether values of a type may contain strings, so that long lists of numbers are not searched.
func mayHoldTexts(t reflect.Type) bool {
	return t.Kind() == reflect.String || t.Kind() >= reflect.Array && t.Kind() != reflect.UnsafePointer &&
		t.Kind() != reflect.Func
}
