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

// A secret describes one form in which a credential appears in a text.
type secret struct {
	re   *regexp.Regexp
	with string
	// re can only match an ASCII text that contains one of these words, ignoring case. With isAssigned, a colon
	// or an equals sign must follow the word. This avoids running the regular expression on most texts.
	words      []string
	isAssigned bool
}

// named matches the names of secrets in key=value and "key": "value".
const named = `[\w-]*(?i:x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|` +
	`secret_?(?:access_?)?key|access_?key(?:_?id)?|session_?token|access_?token|auth_?token|hf_?token|` +
	`api_?key|password|passwd|sas_?token)`

// patterns returns the pattern for URIs in a text, and the patterns for other secrets. They are compiled at
// first use, so that importing the package costs nothing.
var patterns = sync.OnceValues(func() (uri *regexp.Regexp, others []secret) {
	words := []string{"signature", "credential", "token", "key", "passw"}
	mk := func(re, with string, isAssigned bool, words ...string) secret {
		return secret{regexp.MustCompile(re), with, words, isAssigned}
	}
	// Text after a colon that is not a port is a password, even if it contains spaces.
	return regexp.MustCompile(`[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/\s"'@:]*:[^/\s"'@:\[0-9][^\r\n"'@]*@)?[^\s"']*`),
		[]secret{
			mk(`(?i)\b(proxy-authorization|authorization|cookie)("?\s*[:=]\s*"?)[^\r\n"]+`, "${1}${2}"+hidden,
				true, "authorization", "cookie"),
			mk(`(?i)\b(bearer)\s+[^\s"',]+`, "${1} "+hidden, false, "bearer"),
			// After "key: ", a word in lower case is an ordinary word and not a secret.
			mk(`\b(`+named+`)("\s*:\s*"?|\s*=\s*"?|\s*:\s*")[^\s"'&,;]+`, "${1}${2}"+hidden, true, words...),
			mk(`\b(`+named+`)(\s*:\s*)[a-z-]*[^a-z\s"'&,;-][^\s"'&,;]*`, "${1}${2}"+hidden, true, words...),
			// Keys with a known form: AWS ids, Hugging Face, GitHub, GitLab, Slack, Google, OpenAI, JSON web tokens.
			mk(`\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{12,}\b`, hidden,
				false, "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva"),
			mk(`\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|AIza)[A-Za-z0-9_-]{12,}`, hidden,
				false, "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "sk-", "aiza"),
			mk(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, hidden, false, "eyj"),
		}
})

// Redact replaces the credentials in a text: user, password and query of URIs, bearer tokens and authorization
// headers, and keys with a revealing name or the form of a known service. It cannot always determine where a
// URI with spaces ends, so apply RedactURI to a URI before it becomes part of a text.
func Redact(text string) string {
	uri, others := patterns()
	if strings.Contains(text, "://") && strings.ContainsAny(text, "@?#") { // bareURI does not change other URIs
		text = uri.ReplaceAllStringFunc(text, func(s string) string {
			end := len(strings.TrimRight(s, ":,;.)")) // punctuation of the sentence
			return bareURI(s[:end]) + s[end:]
		})
	}
	// The text is converted to lower case only once, because replacing secrets adds neither words nor signs.
	lower, isASCII := strings.ToLower(text), !strings.ContainsFunc(text, isBeyondASCII)
	prefix := lower[:max(0, strings.LastIndexAny(lower, ":="))]
	for i := range others {
		s, before := &others[i], lower
		if s.isAssigned {
			before = prefix
		}
		// (?i) also matches letters outside ASCII, such as the Kelvin sign for k, which are not in the words.
		if !isASCII || slices.ContainsFunc(s.words, func(word string) bool { return strings.Contains(before, word) }) {
			text = s.re.ReplaceAllString(text, s.with)
		}
	}
	return text
}

func isBeyondASCII(r rune) bool { return r >= utf8.RuneSelf }

// pathNames maps paths of this process, such as /proc/self/fd/7, to the paths that users wrote.
var pathNames sync.Map

// CallPath makes RedactURI return name for path. path is an in-memory file that is read instead of the file
// called name.
func CallPath(path, name string) { pathNames.Store(path, name) }

// RedactURI is Redact for the URI or path of a file as the user wrote it. It does not change local paths,
// except those passed to CallPath.
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

// HideUser is RedactURI for URIs with a user or a password; it does not change others. In hf:// URIs, the @
// precedes a revision.
func HideUser(uri string) string {
	scheme, rest, _ := strings.Cut(uri, "://")
	authority, _, _ := strings.Cut(rest, "/")
	if !strings.Contains(authority, "@") || strings.EqualFold(scheme, "hf") {
		return uri
	}
	return RedactURI(uri)
}

// bareURI returns a URI without user, password, query and fragment. Signed queries are secrets, and parameter
// names do not show whether a query is signed. A password may contain any character, even those that a URL
// would have to escape, so any text between a colon in the host part and the last @ may belong to it. Hiding
// part of a name is better than showing a password.
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
			return scheme + hidden // the rest may belong to a password or a query
		}
		scheme, rest = scheme+hidden+"@", rest[at+1:]
	}
	if end := strings.IndexAny(rest, "?#"); end >= 0 {
		rest = rest[:end] + "?" + hidden
	}
	return scheme + rest
}

// Message returns the text of an error for users, without credentials in URIs or elsewhere. It does not change
// local paths. Control characters are escaped (see Visible).
func Message(err error) string { return Visible(redactError(err.Error(), err)) }

// redactError redacts a text that is or contains the text of err.
func redactError(text string, err error) string {
	var at *At
	if !errors.As(err, &at) {
		return Redact(text)
	}
	before, after, whole := strings.Cut(text, at.Error())
	if !whole { // an error that does not contain the text of the error it wraps
		return Redact(text)
	}
	reason := at.reasonText()
	if safe := RedactURI(at.Source); safe != at.Source {
		reason = strings.ReplaceAll(reason, at.Source, safe)
	}
	return Redact(before) + at.placeText() + ": " + redactError(reason, at.Err) + Redact(after)
}
