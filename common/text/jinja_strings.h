#pragma once

/* common/text/jinja_strings.h - what strings can do in a chat template, as Python's do it, byte
 * marks carried along. For jinja_filters and jinja_objects. */

#include "common/text/jinja.h"

/* chars NULL: white space. sides: 1 left, 2 right, 3 both. */
pd_value pd_jinja_strip(pd_jinja_run *run, const pd_string *s, const pd_string *chars, int sides);
/* separator NULL: runs of white space. limit < 0: all. */
pd_value pd_jinja_split(pd_jinja_run *run, const pd_string *s, const pd_string *separator,
                        int64_t limit);
pd_value pd_jinja_rsplit(pd_jinja_run *run, const pd_string *s, const pd_string *separator,
                         int64_t limit);
pd_value pd_jinja_splitlines(pd_jinja_run *run, const pd_string *s);
/* limit < 0: all. */
pd_value pd_jinja_replace(pd_jinja_run *run, const pd_string *s, const pd_string *from,
                          const pd_string *to, int64_t limit);
typedef enum pd_jinja_case {
    PD_JINJA_UPPER,
    PD_JINJA_LOWER,
    PD_JINJA_CAPITALIZE, /* the first letter up, the rest down */
    PD_JINJA_TITLE,      /* that for every word */
} pd_jinja_case;
/* Letters of Latin-1, Greek and Cyrillic change case; others stay. filter: words are what Jinja's
 * title filter takes for words, not what str.title does. */
pd_value pd_jinja_change_case(pd_jinja_run *run, const pd_string *s, pd_jinja_case to, bool filter);
pd_value pd_jinja_join(pd_jinja_run *run, const pd_list *list, const pd_string *separator,
                       const char *attribute);
pd_value pd_jinja_indent(pd_jinja_run *run, const pd_string *s, const pd_string *by, bool first,
                         bool blank);
/* & < > " ' as HTML entities. */
pd_value pd_jinja_escape(pd_jinja_run *run, const pd_string *s);
/* The byte where part first (last) stands in s from byte start on; SIZE_MAX: nowhere. */
size_t pd_jinja_find(const pd_string *s, const pd_string *part, size_t start, bool last);
