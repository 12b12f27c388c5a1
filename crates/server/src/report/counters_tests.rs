//! Every counter is explained in docs/reference/counters.md.

use std::collections::BTreeSet;

use portolan_control::counters::Counters;
use portolan_stack::FragmentCounters;

const PAGE: &str = include_str!("../../../../docs/reference/counters.md");

/// All counters of filters, server, stack and connections.
fn counted() -> BTreeSet<String> {
    let server = Counters::default().report(FragmentCounters::default(), 0);
    let server = server.iter().map(|c| format!("{}.{}", c.group, c.name));
    let filters = portolan_bpf::counter_names().iter().copied();
    let named = filters.chain(portolan_stack::counter_names());
    let named = named.map(|(group, name, _)| format!("{group}.{name}"));
    server.chain(named).collect()
}

/// Names in backquotes at the head of the rows of the page.
fn documented() -> BTreeSet<String> {
    let heads = PAGE
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    heads
        .flat_map(|head| head.split("`, `"))
        .map(|name| name.trim_end_matches('`').to_owned())
        .collect()
}

#[test]
fn the_page_names_every_counter_and_no_other() {
    let (counted, documented) = (counted(), documented());
    let missing: Vec<_> = counted.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&counted).collect();
    assert!(
        missing.is_empty(),
        "docs/reference/counters.md lacks {missing:?}"
    );
    assert!(
        unknown.is_empty(),
        "docs/reference/counters.md invents {unknown:?}"
    );
}

#[test]
fn no_name_is_given_twice() {
    let names: Vec<_> = portolan_stack::counter_names().collect();
    let distinct: BTreeSet<_> = names.iter().map(|(group, name, _)| (group, name)).collect();
    assert_eq!(distinct.len(), names.len());
}
