//! Families of metrics in the text format of OpenMetrics.

use std::fmt;

use portolan_proto::report::{BOUNDS_US, Histogram};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode as encode_registry;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metrics of one name.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Family {
    pub name: String,
    pub help: &'static str,
    pub samples: Samples,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Samples {
    Counters(Vec<(Labels, f64)>),
    Gauges(Vec<(Labels, f64)>),
    Histograms(Vec<(Labels, Histogram)>),
}

pub(super) type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Families(Vec<Family>);

pub(super) fn encode(families: &[Family]) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Families(families.to_vec())));
    let mut page = String::new();
    encode_registry(&mut page, &registry).expect("a string takes any text");
    page
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.0
            .iter()
            .try_for_each(|family| family.encode(&mut encoder))
    }
}

impl Family {
    fn encode(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let kind = match self.samples {
            Samples::Counters(_) => MetricType::Counter,
            Samples::Gauges(_) => MetricType::Gauge,
            Samples::Histograms(_) => MetricType::Histogram,
        };
        let mut metric = encoder.encode_descriptor(&self.name, self.help, None, kind)?;
        match &self.samples {
            Samples::Counters(samples) => samples.iter().try_for_each(|(labels, value)| {
                metric
                    .encode_family(labels)?
                    .encode_counter::<NoLabelSet, _, f64>(value, None)
            }),
            Samples::Gauges(samples) => samples
                .iter()
                .try_for_each(|(labels, value)| metric.encode_family(labels)?.encode_gauge(value)),
            Samples::Histograms(samples) => samples.iter().try_for_each(|(labels, histogram)| {
                let buckets = buckets(histogram);
                let count = buckets.iter().map(|(_, count)| count).sum();
                let sum = histogram.sum_us as f64 / 1e6;
                metric
                    .encode_family(labels)?
                    .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
            }),
        }
    }
}

/// Returns the bounds of the buckets in seconds, and their counts. Counts are claims of programs: they are limited so
/// that no sum of them overflows.
fn buckets(histogram: &Histogram) -> Vec<(f64, u64)> {
    const MOST: u64 = u64::MAX >> 8;
    let bounds = BOUNDS_US.iter().map(|&bound| bound as f64 / 1e6);
    let bounds = bounds.chain([f64::INFINITY]);
    bounds
        .zip(histogram.counts.map(|count| count.min(MOST)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_page_has_types_labels_and_an_end() {
        let page = encode(&[
            Family {
                name: "portolan_up".into(),
                help: "Whether a server answers",
                samples: Samples::Gauges(vec![(Vec::new(), 1.0)]),
            },
            Family {
                name: "portolan_drops".into(),
                help: "Packets dropped",
                samples: Samples::Counters(vec![(vec![("reason", "a\"b\\\n".into())], 7.0)]),
            },
        ]);
        let expected = "# HELP portolan_up Whether a server answers\n\
            # TYPE portolan_up gauge\n\
            portolan_up{} 1.0\n\
            # HELP portolan_drops Packets dropped\n\
            # TYPE portolan_drops counter\n\
            portolan_drops_total{reason=\"a\\\"b\\\\\\n\"} 7.0\n\
            # EOF\n";
        assert_eq!(page, expected);
    }
    #[test]
    fn a_histogram_has_cumulative_buckets_in_seconds() {
        let mut histogram = Histogram::default();
        for microseconds in [3, 70, 70, 2_000_000] {
            histogram.observe(Duration::from_micros(microseconds));
        }
        let page = encode(&[Family {
            name: "portolan_round_trip_seconds".into(),
            help: "Round-trip times",
            samples: Samples::Histograms(vec![(vec![("kind", "a".into())], histogram)]),
        }]);
        for line in [
            "# TYPE portolan_round_trip_seconds histogram",
            "portolan_round_trip_seconds_sum{kind=\"a\"} 2.000143",
            "portolan_round_trip_seconds_count{kind=\"a\"} 4",
            "portolan_round_trip_seconds_bucket{le=\"0.000005\",kind=\"a\"} 1",
            "portolan_round_trip_seconds_bucket{le=\"0.00005\",kind=\"a\"} 1",
            "portolan_round_trip_seconds_bucket{le=\"0.0001\",kind=\"a\"} 3",
            "portolan_round_trip_seconds_bucket{le=\"1.0\",kind=\"a\"} 3",
            "portolan_round_trip_seconds_bucket{le=\"+Inf\",kind=\"a\"} 4",
        ] {
            assert!(page.lines().any(|one| one == line), "{line}\n{page}");
        }
    }

    #[test]
    fn no_claim_of_a_program_overflows_a_bucket() {
        let counts = [u64::MAX; portolan_proto::report::BUCKETS];
        let claimed = Histogram {
            counts,
            sum_us: u64::MAX,
        };
        encode(&[Family {
            name: "portolan_claims_seconds".into(),
            help: "Claims",
            samples: Samples::Histograms(vec![(Vec::new(), claimed)]),
        }]);
    }
}
