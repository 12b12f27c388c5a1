//! Families of metrics in the text format of OpenMetrics.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode as encode_registry;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metrics of one name.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    pub name: String,
    pub help: &'static str,
    pub samples: Samples,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Samples {
    Counters(Vec<(Labels, f64)>),
    Gauges(Vec<(Labels, f64)>),
}

pub type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Families(Vec<Family>);

pub fn encode(families: &[Family]) -> String {
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
        }
    }
}

#[cfg(test)]
mod tests {
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
}
