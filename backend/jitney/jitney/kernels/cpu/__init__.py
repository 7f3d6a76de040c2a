"""Kernels for the CPU, compiled by Numba. Imported only where Numba is.

Six words for sizes, the same in every file of this folder:

========  =========================================================================================
unit      four bytes, what one lane holds in a product: one float32, two bfloat16, four bytes
column    16 outputs of a packed weight, or 16 ranks of an adapter: all their inputs, one vector of
          16 units after the other. Two neighbours are a pair
group     16 tokens of one KV head in the cache (``cache_groups``). With weights of 4 bits, and
          there alone: the inputs that share a scale, as quantization says
span      256 keys: one turn of the online softmax
split     512 keys, after which the softmax begins anew (as in split-K). The splits of a decode are
          computed side by side
item      what a thread takes from a kernel's counter at a time; each kernel says what its items are
========  =========================================================================================

Two more are the processor's: a *vector* is 16 lanes of four bytes, 64 bytes; a *tile* is a register
of AMX, 16 vectors, 1,024 bytes.

One reads from the bottom up; each file says what it calls and who calls it::

    emit             LLVM code by a builder, as Numba functions       } how kernels are written
    processor        which instruction sets there are forms for       }
    simd             vectors, memory and element types                }
    compiled         records, machine code, threads                   }

    amx, dot         instructions: tiles; products of units           } the products that all
    micro_kernel     a few rows times a few vectors, in registers     } others are made of

    cache_groups     16 tokens in the cache                           } attention
    attention_plan   a step cut into entries                          }
    attention_records  arguments and scratch memory                   }
    cache_blocks     blocks of the paged cache as groups              }
    softmax          the online softmax of a row                      }
    attention_rows   a few rows against a span of keys                }
    attention_kernel   items of the plan, their splits                }
    paged_attention  the attention function "cpu"                     }

    product_kernel   x times packed weights                           } linear layers
    four_bit_kernel  the same of 4 bits                               }
    rounding_kernel  x in another form before it                      }
    tile_linear      packs weights, calls these three                 }
    linear           oneDNN's packed product instead                  }

    norm_kernel      RMS norm and rotary embedding                    } all that a layer has
    adapter_table, adapter_kernel   LoRA                              }
    program_kernel, program_list, program   all layers as one call    }

    layer_kernels    what fused modules are made with                 } the way in
    accelerator      what a load takes                                }
    ahead            the attention kernel compiled in another process }
"""
