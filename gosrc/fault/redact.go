package fault

import (
	"regexp"
	"strings"
	"sync"
)

const hidden = "***"

// A secret is one shape that a credential takes in a text.
type secret struct {
	re   *regexp.Regexp
	with string
}

// Compiled at first use, so that importing costs nothing. Where a pattern is in
// doubt it hides too much: a lost path element in an error is better than a
// key in a log.
var secrets = sync.OnceValue(func() []secret {
	mk := func(re, with string) secret { return secret{regexp.MustCompile(re), with} }
	return []secret{
		// scheme://user:password@host, where the password may hold anything, and token@host
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s"'@]*:[^\s"']*@`, "${1}"+hidden+"@"),
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s"'@]+@`, "${1}"+hidden+"@"),
		// every query and fragment of a URL: signed ones are secrets, and names of
		// parameters do not tell which are
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://[^\s"'?#]*)[?#][^\s"']*`, "${1}?"+hidden),
		mk(`(?i)\b(proxy-authorization|authorization|cookie)("?\s*[:=]\s*"?)[^\r\n"]+`, "${1}${2}"+hidden),
		mk(`(?i)\b(bearer)\s+[^\s"',]+`, "${1} "+hidden),
		// key=value and "key": "value"
		mk(`(?i)\b([\w-]*(?:x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|`+
			`secret_?(?:access_?)?key|access_?key(?:_?id)?|session_?token|access_?token|auth_?token|hf_?token|`+
			`api_?key|password|passwd|sas_?token))("?\s*[:=]\s*"?)[^\s"'&,;]+`, "${1}${2}"+hidden),
		// keys that tell by their looks: AWS ids, Hugging Face, GitHub, GitLab, Slack, Google, OpenAI; JSON web tokens
		mk(`\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{12,}\b`, hidden),
		mk(`\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|AIza)[A-Za-z0-9_-]{12,}`, hidden),
		mk(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, hidden),
	}
})

// Redact returns text without the credentials in it: user and password of
// URLs, their whole query, bearer tokens and authorization headers, and keys
// that are named as such or look like those of the known services. Everything
// that people or logs see passes through it.
func Redact(text string) string {
	if !suspicious(text) {
		return text
	}
	for _, s := range secrets() {
		text = s.re.ReplaceAllString(text, s.with)
	}
	return text
}

// suspicious is a cheap test that no secret passes: most texts are paths and
// tensor names and need no regular expression.
func suspicious(text string) bool {
	if strings.ContainsAny(text, "@?=:") {
		return true
	}
	lower := strings.ToLower(text)
	for _, s := range []string{"bearer", "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva",
		"hf_", "gh", "glpat-", "xox", "sk-", "aiza", "eyj"} {
		if strings.Contains(lower, s) {
			return true
		}
	}
	return false
}
