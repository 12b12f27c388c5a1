//! `portolan counters`: drops, refusals, retransmissions and other events, of filters, server and sessions.

use std::time::Duration;

use portolan_proto::report::CounterReport;
use schemars::JsonSchema;
use serde::Serialize;

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::{HolderView, print_json};

/// One counter.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CounterView {
    pub group: String,
    pub name: String,
    pub value: u64,
    /// The holder that counted it; null: the sum over all holders.
    pub holder: Option<HolderView>,
}

fn view(counter: &CounterReport) -> CounterView {
    CounterView {
        group: counter.group.clone(),
        name: counter.name.clone(),
        value: counter.value,
        holder: counter.holder.as_ref().map(Into::into),
    }
}

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Include counters that are zero.
    #[arg(short, long)]
    all: bool,
    /// Show the counters of the server and of each process instead of their sum.
    #[arg(short, long)]
    processes: bool,
    /// Show the differences every SECONDS seconds.
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u32).range(1..))]
    watch: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut counters = arguments.server.counters()?;
    let Some(seconds) = arguments.watch else {
        return show(arguments, &counters);
    };
    loop {
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let next = arguments.server.counters()?;
        show(arguments, &since(&counters, &next))?;
        counters = next;
    }
}

fn show(arguments: &Arguments, counters: &[CounterReport]) -> Result<(), Failure> {
    let wanted: Vec<_> = counters
        .iter()
        .filter(|counter| arguments.wants(counter))
        .collect();
    if arguments.json {
        return print_json(
            &wanted
                .iter()
                .map(|counter| view(counter))
                .collect::<Vec<_>>(),
        );
    }
    for line in align(&wanted) {
        print(line)?;
    }
    if arguments.watch.is_some() {
        print(String::new())?;
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, counter: &CounterReport) -> bool {
        let whose = match counter.group.as_str() {
            "stack" | "tcp" => counter.holder.is_some() == self.processes,
            // Of these the sum is worth reading; of `stack` and `tcp` it hides which holder counted.
            _ => counter.holder.is_none() || self.processes,
        };
        whose && (self.all || counter.value != 0)
    }
}

/// Returns the differences. A holder that is new counts from zero; one that has ended is left out.
fn since(before: &[CounterReport], now: &[CounterReport]) -> Vec<CounterReport> {
    let same = |one: &CounterReport, other: &CounterReport| {
        (&one.group, &one.name, &one.holder) == (&other.group, &other.name, &other.holder)
    };
    let difference = |counter: &CounterReport| {
        let earlier = before.iter().find(|earlier| same(earlier, counter));
        CounterReport {
            value: counter.value.wrapping_sub(earlier.map_or(0, |c| c.value)),
            ..counter.clone()
        }
    };
    now.iter().map(difference).collect()
}

fn align(counters: &[&CounterReport]) -> Vec<String> {
    let names: Vec<_> = counters
        .iter()
        .map(|counter| format!("{}.{}", counter.group, counter.name))
        .collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let line = |(name, counter): (&String, &&CounterReport)| match &counter.holder {
        None => format!("{name:<width$} {:>12}", counter.value),
        Some(holder) => format!(
            "{name:<width$} {:>12}  {}",
            counter.value,
            HolderView::from(holder)
        ),
    };
    names.iter().zip(counters).map(line).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use portolan_proto::report::Holder;

    use super::*;

    fn counter(group: &str, name: &str, value: u64, holder: Option<Holder>) -> CounterReport {
        CounterReport {
            group: group.into(),
            name: name.into(),
            value,
            holder,
        }
    }

    fn nginx() -> Option<Holder> {
        Some(Holder::Process {
            pid: 7,
            program: "nginx".into(),
        })
    }

    #[test]
    fn counters_align_by_their_longest_name() {
        let (one, other) = (
            counter("receive", "matched", 12, None),
            counter("tcp", "timeouts", 3, nginx()),
        );
        assert_eq!(
            align(&[&one, &other]),
            [
                "receive.matched           12",
                "tcp.timeouts               3  7,nginx"
            ]
        );
    }

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn flags_choose_what_is_shown() {
        let counters = [
            counter("server", "processes", 1, None),
            counter("tcp", "timeouts", 0, None),
            counter("tcp", "timeouts", 5, nginx()),
        ];
        let wanted = |flags: &[&str]| {
            let line = Line::parse_from([&["counters"], flags].concat());
            counters.clone().map(|c| line.arguments.wants(&c))
        };
        assert_eq!(wanted(&[]), [true, false, false]);
        assert_eq!(wanted(&["-a"]), [true, true, false]);
        assert_eq!(wanted(&["-p"]), [true, false, true]);
    }

    #[test]
    fn an_interval_shows_differences() {
        let before = [counter("tcp", "timeouts", 5, nginx())];
        let now = [
            counter("tcp", "timeouts", 8, nginx()),
            counter("tcp", "duplicates", 2, nginx()),
        ];
        let values: Vec<_> = since(&before, &now).iter().map(|c| c.value).collect();
        assert_eq!(values, [3, 2]);
    }

    #[test]
    fn a_watch_may_name_its_interval() {
        let watch = |flags: &[&str]| {
            let line = Line::try_parse_from([&["counters"], flags].concat());
            line.map(|line| line.arguments.watch).ok()
        };
        assert_eq!(watch(&[]), Some(None));
        assert_eq!(watch(&["-w"]), Some(Some(1)));
        assert_eq!(watch(&["--watch", "5"]), Some(Some(5)));
        assert_eq!(watch(&["-w", "0"]), None);
    }
}
