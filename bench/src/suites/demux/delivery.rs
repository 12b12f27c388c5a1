//! The delivery forms (MB §4.1), beside the kernel's own stack (MB Table 2).
//!
//! A filter in the driver of a veth makes its peer segment packets in software. So the form with such a filter is
//! measured on a link of its own, beside the kernel and `shm` on the same link.

use std::cell::OnceCell;
use std::rc::Rc;

use super::super::{Better, Case, number};
use crate::bed::{Bed, Side, Stack};
use crate::process::{Background, run};
use crate::{Effort, MeasureError};

const PORT: u16 = 7410;
const TRAFFIC: &str = "portolan-traffic";

/// The link of the measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    /// With default settings.
    Plain,
    /// With the packet filter in the drivers of both ends.
    Hooked,
}

/// A delivery form, and the name of its figures.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    form: &'static str,
    link: Link,
    /// The paper's throughput and latency.
    paper: Option<(&'static str, &'static str)>,
}

/// The paper's values are of a DECstation 5000/200, whose kernel achieved 1070 KB/s and 1.40 ms.
const ROWS: [Row; 5] = [
    Row {
        paper: Some(("740 KB/s", "3.64 ms")),
        ..on_plain_link("server")
    },
    Row {
        paper: Some(("910 KB/s", "1.69 ms")),
        ..on_plain_link("ipc")
    },
    Row {
        paper: Some(("1076 KB/s", "1.82 ms")),
        ..on_plain_link("shm")
    },
    Row {
        name: "shm-beside-ipf",
        link: Link::Hooked,
        ..on_plain_link("shm")
    },
    Row {
        link: Link::Hooked,
        paper: Some(("1088 KB/s", "1.23 ms")),
        ..on_plain_link("shm-ipf")
    },
];

const fn on_plain_link(form: &'static str) -> Row {
    Row {
        name: form,
        form,
        link: Link::Plain,
        paper: None,
    }
}

/// Two hosts whose servers have the packet filter in their drivers; made at the first use.
#[derive(Clone, Default)]
struct HookedBed(Rc<OnceCell<Bed>>);

impl HookedBed {
    fn get(&self) -> Result<&Bed, MeasureError> {
        if let Some(bed) = self.0.get() {
            return Ok(bed);
        }
        let mut bed = Bed::bare(portolan_netns::Bed::veth())?;
        bed.set_settings("[delivery]\nxdp = \"native\"\n");
        bed.start_daemon(Side::Client)?;
        bed.start_daemon(Side::Server)?;
        Ok(self.0.get_or_init(|| bed))
    }

    fn of<'a>(&'a self, link: Link, plain: &'a Bed) -> Result<&'a Bed, MeasureError> {
        match link {
            Link::Plain => Ok(plain),
            Link::Hooked => self.get(),
        }
    }
}

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let count = effort.scaled(10_000.0) as usize;
    let seconds = effort.scaled(2.0);
    let hooked = HookedBed::default();
    let of_row = |row: Row| {
        let Row {
            name, form, link, ..
        } = row;
        let (there, here) = (hooked.clone(), hooked.clone());
        let throughput = Case::new(
            format!("mb-table2-{name}-throughput"),
            "Gb/s",
            Better::Higher,
            move |bed, stack| bulk(there.of(link, bed)?, stack, form, seconds),
        );
        let latency = Case::new(
            format!("mb-table2-{name}-latency"),
            "us",
            Better::Lower,
            move |bed, stack| ping(here.of(link, bed)?, stack, form, count),
        );
        match row.paper {
            Some((rate, time)) => [throughput.of_paper(rate), latency.of_paper(time)],
            None => [throughput, latency],
        }
    };
    ROWS.into_iter().flat_map(of_row).collect()
}

fn bulk(bed: &Bed, stack: Stack, form: &str, seconds: f64) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let _sink = serve(bed, stack, form, &["sink", &endpoint])?;
    let seconds = seconds.to_string();
    let arguments = ["bulk", &endpoint, "--seconds", &seconds];
    client(bed, stack, form, &arguments, "gigabits_per_second")
}

fn ping(bed: &Bed, stack: Stack, form: &str, count: usize) -> Result<f64, MeasureError> {
    let endpoint = bed.endpoint(PORT).to_string();
    let _echo = serve(bed, stack, form, &["echo", "tcp", &endpoint])?;
    let count = count.to_string();
    let arguments = ["ping", "tcp", &endpoint, "--count", &count];
    client(bed, stack, form, &arguments, "p50_us")
}

fn serve(
    bed: &Bed,
    stack: Stack,
    form: &str,
    arguments: &[&str],
) -> Result<Background, MeasureError> {
    let mut command = bed.command(Side::Server, stack, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form).args(arguments);
    command.stdout(std::process::Stdio::null());
    Ok(bed.serve_command(PORT, TRAFFIC, &mut command)?)
}

fn client(
    bed: &Bed,
    stack: Stack,
    form: &str,
    arguments: &[&str],
    field: &str,
) -> Result<f64, MeasureError> {
    let mut command = bed.command(Side::Client, stack, TRAFFIC);
    command.env("PORTOLAN_DELIVERY", form).args(arguments);
    number(TRAFFIC, &run(&mut command)?, &[field])
}
