//! The counters of both filters: one per verdict, named in `bpf/counters.def`.

use libbpf_rs::{MapCore, MapFlags, MapHandle};

const TABLE: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// The number of times one verdict was given since the programs were loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// The filter: `receive` or `transmit`.
    pub group: &'static str,
    pub name: &'static str,
    pub meaning: &'static str,
    pub value: u64,
}

/// Group, name and meaning of every counter.
pub fn counter_names() -> &'static [(&'static str, &'static str, &'static str)] {
    TABLE
}

/// Reads all counters in the order of their table; one that cannot be read is zero.
pub(crate) fn read(map: &MapHandle) -> Vec<Counter> {
    let read_one = |(index, &(group, name, meaning)): (u32, &_)| Counter {
        group,
        name,
        meaning,
        value: sum_over_cpus(map, index),
    };
    (0..).zip(TABLE).map(read_one).collect()
}

fn sum_over_cpus(map: &MapHandle, index: u32) -> u64 {
    let Ok(Some(values)) = map.lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY) else {
        return 0;
    };
    values
        .iter()
        .filter_map(|value| Some(u64::from_ne_bytes(value.as_slice().try_into().ok()?)))
        .fold(0, u64::wrapping_add)
}
