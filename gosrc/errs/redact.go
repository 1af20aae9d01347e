package errs

// This file removes credentials from texts.

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

const hidden = "***"

// A secret is one shape that a credential takes in a text.
type secret struct {
	re   *regexp.Regexp
	with string
	// re matches no text in ASCII whose lower case has none of these words; isAssigned: none that lacks a colon or an
	// equals sign behind the word. So most texts need no regular expression.
	words      []string
	isAssigned bool
}

// named are the names of secrets in key=value and "key": "value".
const named = `[\w-]*(?i:x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|` +
	`secret_?(?:access_?)?key|access_?key(?:_?id)?|session_?token|access_?token|auth_?token|hf_?token|` +
	`api_?key|password|passwd|sas_?token)`

// patterns returns where a URI may be in a text, and the other secrets. They are compiled
// at first use, so that importing costs nothing.
var patterns = sync.OnceValues(func() (uri *regexp.Regexp, others []secret) {
	words := []string{"signature", "credential", "token", "key", "passw"}
	mk := func(re, with string, isAssigned bool, words ...string) secret {
		return secret{regexp.MustCompile(re), with, words, isAssigned}
	}
	// What follows a colon and is no port is a password, also one with spaces.
	return regexp.MustCompile(`[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/\s"'@:]*:[^/\s"'@:\[0-9][^\r\n"'@]*@)?[^\s"']*`),
		[]secret{
			mk(`(?i)\b(proxy-authorization|authorization|cookie)("?\s*[:=]\s*"?)[^\r\n"]+`, "${1}${2}"+hidden,
				true, "authorization", "cookie"),
			mk(`(?i)\b(bearer)\s+[^\s"',]+`, "${1} "+hidden, false, "bearer"),
			// After "key: " a small word is one of a sentence, not a secret.
			mk(`\b(`+named+`)("\s*:\s*"?|\s*=\s*"?|\s*:\s*")[^\s"'&,;]+`, "${1}${2}"+hidden, true, words...),
			mk(`\b(`+named+`)(\s*:\s*)[a-z-]*[^a-z\s"'&,;-][^\s"'&,;]*`, "${1}${2}"+hidden, true, words...),
			// keys known by their form: AWS ids, Hugging Face, GitHub, GitLab, Slack, Google, OpenAI; JSON web tokens
			mk(`\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{12,}\b`, hidden,
				false, "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva"),
			mk(`\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|AIza)[A-Za-z0-9_-]{12,}`, hidden,
				false, "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "sk-", "aiza"),
			mk(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, hidden, false, "eyj"),
		}
})

// Redact replaces the credentials in a text: user, password and query of URIs,
// bearer tokens and authorization headers, and keys that are named as such or
// have the form of a known service's. It cannot always tell where a URI with spaces
// ends: RedactURI takes it alone, before it becomes a part of a text.
func Redact(text string) string {
	uri, others := patterns()
	if strings.Contains(text, "://") && strings.ContainsAny(text, "@?#") { // bareURI changes no other
		text = uri.ReplaceAllStringFunc(text, func(s string) string {
			end := len(strings.TrimRight(s, ":,;.)")) // of the sentence
			return bareURI(s[:end]) + s[end:]
		})
	}
	// The text is lowered once, before secrets are replaced: that adds neither words nor signs.
	lower, isASCII := strings.ToLower(text), !strings.ContainsFunc(text, isBeyondASCII)
	prefix := lower[:max(0, strings.LastIndexAny(lower, ":="))]
	for i := range others {
		s, before := &others[i], lower
		if s.isAssigned {
			before = prefix
		}
		// (?i) also takes letters beyond ASCII, such as the Kelvin sign for k, which words do not have.
		if !isASCII || slices.ContainsFunc(s.words, func(word string) bool { return strings.Contains(before, word) }) {
			text = s.re.ReplaceAllString(text, s.with)
		}
	}
	return text
}

func isBeyondASCII(r rune) bool { return r >= utf8.RuneSelf }

// pathNames are the names by which people know paths of this process, as /proc/self/fd/7.
var pathNames sync.Map

// CallPath has RedactURI give the name for a path: the file that a user named, where another one,
// in memory, stands for it.
func CallPath(path, name string) { pathNames.Store(path, name) }

// RedactURI is Redact for the URI or path of a file, as the user wrote it. A path of a local
// file stays as it is, unless CallPath has named it.
func RedactURI(uri string) string {
	if name, ok := pathNames.Load(uri); ok {
		return name.(string)
	}
	scheme, _, ok := strings.Cut(uri, "://")
	if !ok || scheme == "" || strings.EqualFold(scheme, "file") || strings.ContainsAny(scheme, `/\.`) {
		return uri
	}
	return Redact(bareURI(uri))
}

// HideUser is RedactURI for a URI that has a user or a password; all else stays. Of hf:// what follows the @ is a revision.
func HideUser(uri string) string {
	scheme, rest, _ := strings.Cut(uri, "://")
	authority, _, _ := strings.Cut(rest, "/")
	if !strings.Contains(authority, "@") || strings.EqualFold(scheme, "hf") {
		return uri
	}
	return RedactURI(uri)
}

// bareURI is a URI without user and password, query and fragment: signed queries are
// secrets, and the names of parameters do not show which are. A password may contain
// anything, also what a URL would have to escape: what follows a colon in the place of the
// host may be one, up to the last @. This rather hides too much: losing a part of a name
// in a message is better than showing a password.
func bareURI(uri string) string {
	scheme, rest, _ := strings.Cut(uri, "://")
	scheme += "://"
	authority := rest
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		authority = rest[:end]
	}
	user, _, hasUser := strings.Cut(authority, "@")
	at := -1
	switch {
	case strings.Contains(user, ":"):
		at = strings.LastIndexByte(rest, '@')
	case hasUser:
		at = strings.LastIndexByte(authority, '@')
	}
	if at >= 0 {
		if strings.ContainsAny(rest[:at], "?#") {
			return scheme + hidden // of a password, or of a query: what follows may belong to it
		}
		scheme, rest = scheme+hidden+"@", rest[at+1:]
	}
	if end := strings.IndexAny(rest, "?#"); end >= 0 {
		rest = rest[:end] + "?" + hidden
	}
	return scheme + rest
}

// Message is the text of an error as people may see it: without the credentials in the
// URIs of its places, whatever these contain, and in its other words. Paths of local files
// stay as they are. It steers no terminal: see Visible.
func Message(err error) string { return Visible(redactError(err.Error(), err)) }

// redactError is Message where text is that of err, or contains it.
func redactError(text string, err error) string {
	var at *At
	if !errors.As(err, &at) {
		return Redact(text)
	}
	before, after, whole := strings.Cut(text, at.Error())
	if !whole { // an error that does not repeat what it wraps
		return Redact(text)
	}
	reason := at.reasonText()
	if safe := RedactURI(at.Source); safe != at.Source {
		reason = strings.ReplaceAll(reason, at.Source, safe)
	}
	return Redact(before) + at.placeText() + ": " + redactError(reason, at.Err) + Redact(after)
}
